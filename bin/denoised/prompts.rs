//! Prompts from a file or standard input, one per line.

use crate::error::Error;
use denoised_types::GenerateRequest;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Largest prompt file.
const MAX_BYTES: u64 = 64 << 20;

/// Reads the prompts of `path` (`-`: standard input).
///
/// # Errors
/// The file cannot be read, is too large or is no UTF-8; a line is too long; there is no prompt in it.
pub(crate) fn read(path: &Path) -> Result<Vec<String>, Error> {
    let (name, source): (String, Box<dyn Read>) = if path == Path::new("-") {
        ("standard input".to_owned(), Box::new(std::io::stdin().lock()))
    } else {
        let name = path.display().to_string();
        let file = File::open(path)
            .map_err(|cause| Error::usage(format!("cannot read the prompt file {name}: {cause}")))?;
        (name, Box::new(file))
    };
    let mut bytes = Vec::new();
    source
        .take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|cause| Error::usage(format!("cannot read the prompt file {name}: {cause}")))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Error::usage(format!(
            "the prompt file {name} has more than {MAX_BYTES} bytes"
        )));
    }
    let text = String::from_utf8(bytes).map_err(|cause| {
        let at = cause.utf8_error().valid_up_to();
        Error::usage(format!("the prompt file {name} is not UTF-8 (at byte {at})"))
    })?;
    parse(&text, &name)
}

fn parse(text: &str, name: &str) -> Result<Vec<String>, Error> {
    let mut prompts = Vec::new();
    // Editors of some systems put a byte order mark in front.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    for (line_idx, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let prompt = match line.strip_prefix('\\') {
            Some(rest) if rest.starts_with('#') => rest,
            _ => line,
        };
        let place = format!("line {} of the prompt file {name}", line_idx + 1);
        if prompt.len() > GenerateRequest::MAX_PROMPT_BYTES {
            return Err(Error::usage(format!(
                "{place} has {} bytes; a prompt may have {}",
                prompt.len(),
                GenerateRequest::MAX_PROMPT_BYTES
            )));
        }
        if prompt.contains('\0') {
            return Err(Error::usage(format!("{place} contains a NUL character")));
        }
        prompts.push(prompt.to_owned());
    }
    if prompts.is_empty() {
        return Err(Error::usage(format!(
            "the prompt file {name} contains no prompt (one per line; blank lines and lines that start with # are skipped)"
        )));
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_prompt_per_line_without_blank_lines_and_comments() {
        let text = "\u{feff}a cat\r\n\n   \n# not this\n\\# this\n \\backslash \nlast";
        assert_eq!(
            parse(text, "x").unwrap(),
            ["a cat", "# this", "\\backslash", "last"]
        );
    }

    #[test]
    fn a_file_without_prompts_is_refused() {
        for text in ["", "\n\n", "# only\n  # comments\n"] {
            let message = parse(text, "x.txt").unwrap_err().to_string();
            assert!(message.contains("x.txt contains no prompt"), "{message}");
        }
    }

    #[test]
    fn a_line_that_cannot_be_a_prompt_is_named() {
        let text = format!("fine\n{}", "x".repeat(GenerateRequest::MAX_PROMPT_BYTES + 1));
        assert!(parse(&text, "x").unwrap_err().to_string().starts_with("line 2 "));
        assert!(parse("a\0b", "x").unwrap_err().to_string().contains("NUL"));
    }
}
