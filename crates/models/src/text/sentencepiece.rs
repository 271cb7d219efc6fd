//! sentencepiece's model file (`spiece.model`): a protobuf message `ModelProto`, read as far as transformers reads it.
//!
//! R1. Whatever the bytes, the reader ends, allocates no more than what the file holds and [`PIECE_LIMIT`] pieces take, and says at
//!     which byte it is wrong.

/// What a piece is for (`ModelProto.SentencePiece.Type`), as far as it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceKind {
    /// Part of the vocabulary.
    Plain,
    /// `</s>` and the like.
    Control,
    /// A text that stays in one piece.
    UserDefined,
}

/// A piece of text.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) score: f32,
    pub(super) kind: PieceKind,
}

/// The file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SentencePieceModel {
    /// The position of a piece is its id.
    pub(super) pieces: Vec<Piece>,
    /// Rules of normalization, compiled; empty for none.
    pub(super) charsmap: Vec<u8>,
}

/// Published ones have up to 250 thousand pieces; an empty one takes two bytes of a file.
const PIECE_LIMIT: usize = 1 << 20;
/// `TrainerSpec.ModelType.UNIGRAM`.
const UNIGRAM: u64 = 1;

impl SentencePieceModel {
    /// Reads a file of a unigram model.
    ///
    /// # Errors
    /// What is wrong, and at which byte; or it is another kind of model.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut model = Self {
            pieces: Vec::new(),
            charsmap: Vec::new(),
        };
        let mut kind = UNIGRAM;
        for_each_field(bytes, 0, |number, at, value| {
            match (number, value) {
                (1, Value::Bytes(_)) if model.pieces.len() == PIECE_LIMIT => {
                    return Err(format!("piece {PIECE_LIMIT} at byte {at} is one too many"));
                }
                (1, Value::Bytes(piece)) => model.pieces.push(read_piece(piece, at)?),
                (2, Value::Bytes(trainer)) => for_each_field(trainer, at, |number, _, value| {
                    if let (3, Value::Varint(found)) = (number, value) {
                        kind = found;
                    }
                    Ok(())
                })?,
                (3, Value::Bytes(normalizer)) => for_each_field(normalizer, at, |number, _, value| {
                    if let (2, Value::Bytes(charsmap)) = (number, value) {
                        model.charsmap = charsmap.to_vec();
                    }
                    Ok(())
                })?,
                (1..=3, _) => return Err(format!("field {number} at byte {at} is no message")),
                _ => {}
            }
            Ok(())
        })?;
        match kind {
            UNIGRAM => Ok(model),
            other => Err(format!(
                "the model type is {other}, only unigram (1) is supported"
            )),
        }
    }
}

fn read_piece(bytes: &[u8], start: usize) -> Result<Piece, String> {
    let mut piece = Piece {
        text: String::new(),
        score: 0.0,
        kind: PieceKind::Plain,
    };
    for_each_field(bytes, start, |number, at, value| {
        match (number, value) {
            (1, Value::Bytes(text)) => {
                let text = std::str::from_utf8(text);
                text.map_err(|_| format!("the piece at byte {at} is no UTF-8"))?
                    .clone_into(&mut piece.text);
            }
            (2, Value::Fixed32(bits)) => piece.score = f32::from_bits(bits),
            (3, Value::Varint(kind)) => {
                piece.kind = match kind {
                    3 => PieceKind::Control,
                    4 => PieceKind::UserDefined,
                    _ => PieceKind::Plain,
                };
            }
            (1..=3, _) => {
                return Err(format!(
                    "field {number} of the piece at byte {at} has another type"
                ));
            }
            _ => {}
        }
        Ok(())
    })?;
    Ok(piece)
}

/// A value as the wire format has it.
enum Value<'a> {
    Varint(u64),
    Fixed64,
    Bytes(&'a [u8]),
    Fixed32(u32),
}

/// Calls `take(number, byte of its value in the file, value)` for each field of a message that begins at byte `start` of the file.
fn for_each_field<'a>(
    message: &'a [u8],
    start: usize,
    mut take: impl FnMut(u64, usize, Value<'a>) -> Result<(), String>,
) -> Result<(), String> {
    let mut rest = message;
    let place = |rest: &[u8]| start + message.len() - rest.len();
    let ended = |at: usize| format!("the model ends or is damaged at byte {at}");
    while !rest.is_empty() {
        let at = place(rest);
        let tag = varint(&mut rest).ok_or_else(|| ended(at))?;
        let at = place(rest);
        let value = match tag & 7 {
            0 => varint(&mut rest).map(Value::Varint),
            1 => take_bytes(&mut rest, 8).map(|_| Value::Fixed64),
            2 => varint(&mut rest)
                .and_then(|len| take_bytes(&mut rest, usize::try_from(len).ok()?))
                .map(Value::Bytes),
            5 => take_bytes(&mut rest, 4)
                .and_then(|bytes| Some(u32::from_le_bytes(bytes.try_into().ok()?)))
                .map(Value::Fixed32),
            other => return Err(format!("wire type {other} before byte {at} is unknown")),
        };
        let value = value.ok_or_else(|| ended(at))?;
        // Of a message, where its content begins.
        let at = match &value {
            Value::Bytes(bytes) => place(rest) - bytes.len(),
            Value::Varint(_) | Value::Fixed64 | Value::Fixed32(_) => at,
        };
        take(tag >> 3, at, value)?;
    }
    Ok(())
}

fn take_bytes<'a>(rest: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (taken, tail) = rest.split_at_checked(len)?;
    *rest = tail;
    Some(taken)
}

/// Seven bits per byte, least first; at most ten bytes.
fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, tail) = rest.split_first()?;
        *rest = tail;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    // Written by hand after protobuf's description of its encoding.
    const MODEL: &[u8] = b"\x0a\x11\x0a\x05</s>!\x15\x00\x00\xc0\xbf\x18\x03\xaa\x06\x00\x0a\x03\x0a\x01a\x12\x02\x18\x01\x1a\x04\x12\x02cm\x22\x00";

    #[test]
    fn pieces_and_charsmap_are_read_and_the_rest_is_passed_over() {
        // The first piece holds an extension (field 101) of no bytes.
        let model = SentencePieceModel::parse(MODEL).expect("a model");
        let [first, second] = &model.pieces[..] else {
            panic!("{model:?}")
        };
        assert_eq!(
            (first.text.as_str(), first.score, first.kind),
            ("</s>!", -1.5, PieceKind::Control)
        );
        assert_eq!(
            (second.text.as_str(), second.score, second.kind),
            ("a", 0.0, PieceKind::Plain)
        );
        assert_eq!(model.charsmap, b"cm");
    }

    #[test]
    fn every_beginning_of_a_file_is_read_or_refused() {
        for end in 0..MODEL.len() {
            let _ = SentencePieceModel::parse(&MODEL[..end]);
        }
        for (bytes, problem) in [
            (&b"\x0a\x10\x0a"[..], "at byte 1"),
            (b"\x0b", "wire type 3"),
            (b"\x08\x01", "field 1 at byte 1 is no message"),
            (b"\x0a\x03\x0a\x01\xff", "at byte 4 is no UTF-8"),
            (b"\x12\x02\x18\x02", "model type is 2"),
            (
                &b"\x0a\x00".repeat(PIECE_LIMIT + 1),
                "piece 1048576 at byte 2097154",
            ),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "at byte 0"),
        ] {
            let error = SentencePieceModel::parse(bytes).expect_err("it is damaged");
            assert!(error.contains(problem), "{error}");
        }
    }
}
