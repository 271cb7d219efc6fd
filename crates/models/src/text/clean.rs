//! What diffusers' pipelines do to a prompt before it is cut into tokens.
//!
//! Wan's also sends it through ftfy where that is installed, which repairs text that was decoded with the wrong encoding, and makes
//! curly quotes straight, ligatures letters and full-width characters narrow. That is not done here: it is what diffusers computes
//! without ftfy.

use std::{collections::HashMap, sync::LazyLock};

/// HTML's named characters, `tests/tables/make_clean.py`: per line the name, with the semicolon where it needs one, and code points.
const ENTITIES: &str = include_str!("html_entities.txt");
/// Longest run behind `&` that is looked up, in characters, without its semicolon.
const NAME_LIMIT_CHARS: usize = 32;

/// Wan's: HTML's escapes undone twice, white space to single spaces.
pub(crate) fn clean_wan(text: &str) -> String {
    let text = unescape(&unescape(text));
    // The regular expression of white space does not take for it all that the trimming at the ends does.
    let collapsed = collapse(text.trim_matches(is_space));
    collapsed.trim_matches(is_space).to_owned()
}

/// PixArt's, without `clean_caption`: lower case, no white space around.
pub(crate) fn clean_pixart(text: &str) -> String {
    text.to_lowercase().trim_matches(is_space).to_owned()
}

/// What Python's `strip` takes for white space.
fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// Runs of white space to one space each.
fn collapse(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_space = false;
    for c in text.chars() {
        let is_space = c.is_whitespace();
        if !(is_space && in_space) {
            out.push(if is_space { ' ' } else { c });
        }
        in_space = is_space;
    }
    out
}

/// Python's `html.unescape`.
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        let behind = &rest[at + 1..];
        let len = number(behind, &mut out).or_else(|| name(behind, &mut out));
        rest = match len {
            Some(len) => &behind[len..],
            None => {
                out.push('&');
                behind
            }
        };
    }
    out.push_str(rest);
    out
}

/// Reads `#65;` or `#x41;` at the start of `text` and writes the character; the bytes read, or nothing if that is not there.
fn number(text: &str, out: &mut String) -> Option<usize> {
    let behind = text.strip_prefix('#')?;
    let (digits, radix) = match behind.strip_prefix(['x', 'X']) {
        Some(digits) => (digits, 16),
        None => (behind, 10),
    };
    let is_digit = |c: char| c.is_digit(radix);
    let digits = &digits[..digits.find(|c| !is_digit(c)).unwrap_or(digits.len())];
    if digits.is_empty() {
        return None;
    }
    let number = digits
        .chars()
        .filter_map(|c| c.to_digit(radix))
        .fold(0, |n, d| u32::saturating_add(u32::saturating_mul(n, radix), d));
    out.extend(character(number));
    let prefix = text.len() - behind.len() + usize::from(radix == 16);
    let len = prefix + digits.len();
    Some(len + usize::from(text[len..].starts_with(';')))
}

/// The character that a number stands for, if it stands for any.
fn character(number: u32) -> Option<char> {
    // What Windows-1252 has where Unicode has control characters.
    const WINDOWS: [char; 32] = [
        '€', '\u{81}', '‚', 'ƒ', '„', '…', '†', '‡', 'ˆ', '‰', 'Š', '‹', 'Œ', '\u{8d}', 'Ž', '\u{8f}',
        '\u{90}', '‘', '’', '“', '”', '•', '–', '—', '˜', '™', 'š', '›', 'œ', '\u{9d}', 'ž', 'Ÿ',
    ];
    match number {
        0 => Some('\u{fffd}'),
        0x80..=0x9f => Some(WINDOWS[number as usize - 0x80]),
        1..=8 | 0xb | 0xe..=0x1f | 0x7f | 0xfdd0..=0xfdef => None,
        _ if number & 0xfffe == 0xfffe && number <= 0x0010_ffff => None,
        _ => Some(char::from_u32(number).unwrap_or('\u{fffd}')),
    }
}

/// Reads a name at the start of `text` and writes its characters, or those of its longest start that is a name and then the others.
fn name(text: &str, out: &mut String) -> Option<usize> {
    let mut len = 0;
    for c in text.chars().take(NAME_LIMIT_CHARS) {
        if matches!(c, '\t' | '\n' | '\u{c}' | ' ' | '<' | '&' | '#' | ';') {
            break;
        }
        len += c.len_utf8();
    }
    if len == 0 {
        return None;
    }
    len += usize::from(text[len..].starts_with(';'));
    let run = &text[..len];
    let shorter = run.char_indices().rev().map(|(end, _)| end);
    let found = std::iter::once(len)
        .chain(shorter)
        .find_map(|end| Some((end, ENTITY_CHARS.get(&run[..end])?)));
    let (end, chars) = found?;
    out.push_str(chars);
    out.push_str(&run[end..]);
    Some(len)
}

static ENTITY_CHARS: LazyLock<HashMap<&str, String>> = LazyLock::new(|| {
    let entity = |line: &'static str| {
        let (name, points) = line.split_once(' ')?;
        let chars = points.split(',').map(|point| {
            let point = u32::from_str_radix(point, 16).ok()?;
            char::from_u32(point)
        });
        Some((name, chars.collect::<Option<String>>()?))
    };
    ENTITIES.lines().filter_map(entity).collect()
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tables::table;

    #[test]
    fn prompts_become_what_diffusers_makes_of_them() {
        assert_eq!(ENTITY_CHARS.len(), ENTITIES.lines().count());
        // `tests/tables/make_clean.py`.
        let table = table("clean.json");
        let rows = table["wan"].as_array().expect("a list");
        assert!(rows.len() > 400);
        for row in rows {
            let [text, wan, pixart] = [0, 1, 2].map(|idx| row[idx].as_str().expect("a text"));
            assert_eq!(clean_wan(text), wan, "{text:?}");
            assert_eq!(clean_pixart(text), pixart, "{text:?}");
        }
    }

    #[test]
    fn long_prompts_take_time_in_proportion() {
        for unit in ["&", "&a", "&#", "&amp", "&#x26;#38;", " ", "&amp;amp;", "é&"] {
            clean_wan(&unit.repeat((1 << 18) / unit.len()));
        }
    }
}
