//! Where results go: files that appear whole or not at all, and a standard output that may be closed.

use crate::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Files to write, checked before any picture is computed.
#[derive(Debug)]
pub(crate) enum Target {
    /// The standard output.
    Stdout,
    /// One file per picture.
    Files(Vec<PathBuf>),
}

impl Target {
    /// Names for pictures with these seeds, from what `-o` says.
    ///
    /// `{index}` and `{seed}` are replaced; without either, `-{index}` is put before the extension when there are several.
    ///
    /// # Errors
    /// Two pictures would have the same name, the extension is not PNG's, several pictures would go to the standard output,
    /// or a file could not be written there.
    pub(crate) fn new(pattern: &Path, seeds: &[u64]) -> Result<Self, Error> {
        if pattern == Path::new("-") {
            if seeds.len() > 1 {
                return Err(Error::usage(format!(
                    "-o - writes one picture to standard output, {} are asked for; name a file",
                    seeds.len()
                )));
            }
            return Ok(Self::Stdout);
        }
        let paths = file_names(pattern, seeds)?;
        let mut checked: Option<&Path> = None;
        for path in &paths {
            refuse_folder(path)?;
            let folder = folder_of(path);
            if checked != Some(folder) {
                probe(path)?;
                checked = Some(folder);
            }
        }
        Ok(Self::Files(paths))
    }

    /// The file of picture `image_idx`; `None` for the standard output.
    pub(crate) fn file(&self, image_idx: usize) -> Option<&Path> {
        match self {
            Self::Stdout => None,
            Self::Files(paths) => paths.get(image_idx).map(PathBuf::as_path),
        }
    }

    /// Whether the names are those of WebP files; `None` if they do not say.
    pub(crate) fn is_webp(&self) -> Option<bool> {
        let extension = self.file(0)?.extension()?.to_str()?;
        let is = |name: &str| extension.eq_ignore_ascii_case(name);
        (is("webp") || is("png")).then(|| is("webp"))
    }

    /// Writes picture `image_idx`.
    ///
    /// # Errors
    /// [`Error::Output`] naming the file; nothing of it is left behind.
    pub(crate) fn write(&self, image_idx: usize, bytes: &[u8]) -> Result<(), Error> {
        match self.file(image_idx) {
            Some(path) => write_file(path, |file| file.write_all(bytes)),
            None => write_stdout(bytes),
        }
    }
}

fn file_names(pattern: &Path, seeds: &[u64]) -> Result<Vec<PathBuf>, Error> {
    let shown = pattern.display();
    let Some(name) = pattern.file_name().and_then(|name| name.to_str()) else {
        return Err(Error::usage(format!("-o {shown}: not a file name")));
    };
    let stem_and_extension = name.rsplit_once('.').filter(|(stem, _)| !stem.is_empty());
    if let Some((_, extension)) = stem_and_extension
        && !extension.eq_ignore_ascii_case("png")
        && !extension.eq_ignore_ascii_case("webp")
        && !extension.contains('}')
    {
        return Err(Error::usage(format!(
            "-o {shown}: pictures are written as PNG and videos as animated WebP; name it .png or .webp"
        )));
    }
    let has_place = name.contains("{index}") || name.contains("{seed}");
    let name = match stem_and_extension {
        _ if has_place || seeds.len() <= 1 => name.to_owned(),
        Some((stem, extension)) => format!("{stem}-{{index}}.{extension}"),
        None => format!("{name}-{{index}}"),
    };
    let paths: Vec<PathBuf> = seeds
        .iter()
        .enumerate()
        .map(|(image_idx, seed)| {
            let name = name.replace("{index}", &image_idx.to_string());
            pattern.with_file_name(name.replace("{seed}", &seed.to_string()))
        })
        .collect();
    let mut sorted: Vec<&PathBuf> = paths.iter().collect();
    sorted.sort();
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::usage(format!(
            "-o {shown}: several pictures would be written to {}; put {{index}} into the name",
            pair[0].display()
        )));
    }
    Ok(paths)
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn failed(path: &Path, cause: &io::Error) -> Error {
    Error::Output(format!("cannot write {}: {cause}", path.display()))
}

/// Whether a file could be written at `path`: better known before the work than after it.
///
/// # Errors
/// [`Error::Output`] naming the file.
pub(crate) fn check(path: &Path) -> Result<(), Error> {
    refuse_folder(path)?;
    probe(path)
}

fn refuse_folder(path: &Path) -> Result<(), Error> {
    if path.is_dir() {
        return Err(Error::Output(format!(
            "cannot write {}: it is a folder; name a file in it",
            path.display()
        )));
    }
    Ok(())
}

/// Whether a file could be created beside `path`.
fn probe(path: &Path) -> Result<(), Error> {
    let folder = folder_of(path);
    if !folder.is_dir() {
        return Err(Error::Output(format!(
            "cannot write {}: there is no folder {}",
            path.display(),
            folder.display()
        )));
    }
    if is_special(path) {
        return Ok(());
    }
    let temporary = temporary_beside(path);
    new_file(&temporary).map_err(|cause| failed(path, &cause))?;
    let _ = fs::remove_file(&temporary);
    Ok(())
}

/// Devices and pipes are written to; replacing them by a file would be a surprise.
fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| !metadata.is_file())
}

fn temporary_beside(path: &Path) -> PathBuf {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    path.with_file_name(format!(".{name}.{}.part", std::process::id()))
}

fn new_file(path: &Path) -> io::Result<File> {
    // A file of this name can only be a leftover of a killed process with the same id.
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
}

/// Writes a file under a temporary name and renames it when it is whole.
///
/// # Errors
/// [`Error::Output`] naming the file; nothing of it is left behind.
pub(crate) fn write_file(path: &Path, fill: impl FnOnce(&mut File) -> io::Result<()>) -> Result<(), Error> {
    if is_special(path) {
        let filled = OpenOptions::new()
            .write(true)
            .open(path)
            .and_then(|mut file| fill(&mut file));
        return filled.map_err(|cause| failed(path, &cause));
    }
    // A link is followed, so that what it points to is replaced and not the link.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let temporary = temporary_beside(&target);
    let written = new_file(&temporary).and_then(|mut file| {
        fill(&mut file)?;
        // Some file systems report a full disk only here.
        file.sync_all()?;
        fs::rename(&temporary, &target)
    });
    written.map_err(|cause| {
        let _ = fs::remove_file(&temporary);
        failed(path, &cause)
    })
}

/// Writes to the standard output at once.
///
/// # Errors
/// [`Error::Output`] if it is closed or full; never a panic.
pub(crate) fn write_stdout(bytes: &[u8]) -> Result<(), Error> {
    if denoised_os::stdio::stdout_was_closed() {
        return Err(Error::Output(
            "cannot write to standard output: it is closed".to_owned(),
        ));
    }
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(bytes)
        .and_then(|()| stdout.flush())
        .map_err(|cause| Error::Output(format!("cannot write to standard output: {cause}")))
}

/// Writes a line to the standard error; a closed one is nobody's loss.
pub(crate) fn say(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(pattern: &str, seeds: &[u64]) -> Vec<String> {
        let paths = file_names(Path::new(pattern), seeds).unwrap();
        paths.iter().map(|path| path.display().to_string()).collect()
    }

    #[test]
    fn several_pictures_get_numbers() {
        assert_eq!(names("out.png", &[5]), ["out.png"]);
        assert_eq!(names("a/out.png", &[5, 6]), ["a/out-0.png", "a/out-1.png"]);
        assert_eq!(names("out", &[5, 6]), ["out-0", "out-1"]);
        assert_eq!(names("{seed}.png", &[5, 6]), ["5.png", "6.png"]);
        assert_eq!(names("x.{index}", &[5, 6]), ["x.0", "x.1"]);
        assert_eq!(names("{index}-{seed}.PNG", &[5, 5]), ["0-5.PNG", "1-5.PNG"]);
    }

    #[test]
    fn names_that_collide_or_promise_another_format_are_refused() {
        assert!(file_names(Path::new("{seed}.png"), &[5, 5]).is_err());
        assert!(file_names(Path::new("out.jpg"), &[5]).is_err());
        assert!(file_names(Path::new(".."), &[5]).is_err());
    }

    #[test]
    fn a_file_that_cannot_be_finished_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.png");
        let error = write_file(&path, |file| {
            file.write_all(b"half")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert!(matches!(error, Err(Error::Output(_))));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);

        fs::write(&path, "old").unwrap();
        assert!(write_file(&path, |_| Err(io::ErrorKind::StorageFull.into())).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        write_file(&path, |file| file.write_all(b"new")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_link_stays_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file.png"), folder.path().join("link.png"));
        fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_file(&link, |file| file.write_all(b"new")).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[test]
    fn a_missing_folder_is_refused_before_the_work() {
        let folder = tempfile::tempdir().unwrap();
        let pattern = folder.path().join("absent/out.png");
        let error = Target::new(&pattern, &[1]).unwrap_err();
        assert!(error.to_string().contains("there is no folder"), "{error}");
        assert!(Target::new(folder.path(), &[1]).is_err());
        assert!(Target::new(Path::new("-"), &[1, 2]).is_err());
    }
}
