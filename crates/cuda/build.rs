//! Embeds compiled kernels (`scripts/kernels` makes them) that are of exactly these sources; without any, kernels are compiled at start.

use sha2::{Digest, Sha256};
use std::{env, fmt::Write, fs, io, path::Path};

fn main() -> io::Result<()> {
    let crate_folder = env::var("CARGO_MANIFEST_DIR").map_err(io::Error::other)?;
    let kernels = Path::new(&crate_folder).join("kernels");
    println!("cargo::rerun-if-changed={}", kernels.display());
    let prebuilt = kernels.join("prebuilt");
    let portable = fs::read(kernels.join("portable.cuh"))?;
    let mut list = String::from("[\n");
    let entries = fs::read_dir(&kernels)?.map(|entry| Ok(entry?.path()));
    let mut paths = entries.collect::<io::Result<Vec<_>>>()?;
    // Equal sources make equal programs.
    paths.sort();
    for path in paths {
        if path.extension().is_none_or(|ending| ending != "cu") {
            continue;
        }
        let Some(name) = path.file_stem().and_then(|name| name.to_str()) else {
            continue;
        };
        let digest = digest(&portable, &fs::read(&path)?);
        let image = prebuilt.join(format!("{name}-{digest}.fatbin"));
        if image.is_file() {
            let path = image.display().to_string();
            // The driver reads numbers of eight bytes in it.
            let _ = writeln!(list, "    ({name:?}, &Aligned(*include_bytes!({path:?}))),");
        } else if prebuilt.is_dir() {
            println!(
                "cargo::warning=no compiled kernels of this {name}.cu in {}: scripts/kernels makes them",
                prebuilt.display()
            );
        }
    }
    list.push(']');
    let out_folder = env::var("OUT_DIR").map_err(io::Error::other)?;
    fs::write(Path::new(&out_folder).join("prebuilt.rs"), list)
}

/// As `scripts/kernels` names its files.
fn digest(portable: &[u8], own: &[u8]) -> String {
    let mut hasher = Sha256::new();
    hasher.update(portable);
    hasher.update(own);
    hasher.finalize()[..8]
        .iter()
        .fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}
