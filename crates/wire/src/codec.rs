//! Bytes of messages: a fixed [`Header`], then the body in postcard.
//!
//! R1. A message is at most [`MAX_MESSAGE_BYTES`] long; its blobs travel beside it and do not count.
//! R2. Decoding takes at most about 30 times the message's length of memory (short list entries grow in memory), plus 1 MiB per list
//!     that lies about its length, and never panics.
//! R3. Bytes that are left over after the body are an error: the peers do not mean the same message.

use crate::{BootDown, BootUp, Command, Event, HEADER_BYTES, Header, PROTOCOL_VERSION};
use serde::{Serialize, de::DeserializeOwned};

/// Longest message, header included, blobs excluded. Enough for a wave of 16 requests with the longest prompts.
pub const MAX_MESSAGE_BYTES: usize = 8 << 20;

/// Why bytes are not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Not even a header.
    #[error("message of {message_bytes} bytes is shorter than its header of {header_bytes} bytes")]
    TooShort {
        /// Its length.
        message_bytes: usize,
        /// Bytes of a header.
        header_bytes: usize,
    },
    /// Over the limit.
    #[error("message of {message_bytes} bytes exceeds the limit of {limit_bytes} bytes")]
    TooLong {
        /// Its length.
        message_bytes: usize,
        /// [`MAX_MESSAGE_BYTES`].
        limit_bytes: usize,
    },
    /// The peer speaks another version of these messages.
    #[error("message has protocol version {theirs}, this program speaks version {ours}")]
    WrongVersion {
        /// The peer's version.
        theirs: u16,
        /// [`PROTOCOL_VERSION`].
        ours: u16,
    },
    /// The body is not what its kind says, or of an unknown kind.
    #[error("body of {body_bytes} bytes is no {what}: {reason}")]
    Corrupt {
        /// What was expected: `command`, `event`, ….
        what: &'static str,
        /// Length of the body.
        body_bytes: usize,
        /// The codec's words.
        reason: String,
    },
    /// Bytes are left over behind the body.
    #[error("{extra_bytes} bytes are left over behind a {what}")]
    Trailing {
        /// What was decoded.
        what: &'static str,
        /// How many.
        extra_bytes: usize,
    },
}

/// Appends the message to `bytes`.
pub fn encode_command(bytes: &mut Vec<u8>, header: Header, command: &Command) {
    bytes.extend_from_slice(&header.to_bytes());
    append(bytes, command);
}

/// Appends the message to `bytes`.
pub fn encode_event(bytes: &mut Vec<u8>, header: Header, event: &Event) {
    bytes.extend_from_slice(&header.to_bytes());
    append(bytes, event);
}

/// Splits a message into its header and its body, whatever its version says.
///
/// # Errors
/// [`DecodeError::TooShort`] or [`DecodeError::TooLong`].
pub fn split_header(message: &[u8]) -> Result<(Header, &[u8]), DecodeError> {
    if message.len() > MAX_MESSAGE_BYTES {
        return Err(DecodeError::TooLong {
            message_bytes: message.len(),
            limit_bytes: MAX_MESSAGE_BYTES,
        });
    }
    match message.split_first_chunk::<HEADER_BYTES>() {
        Some((header, body)) => Ok((Header::from_bytes(header), body)),
        None => Err(DecodeError::TooShort {
            message_bytes: message.len(),
            header_bytes: HEADER_BYTES,
        }),
    }
}

/// Decodes the body of a command whose header says `header`.
///
/// # Errors
/// Another version, an unknown kind, a damaged or a longer body.
pub fn decode_command(header: &Header, body: &[u8]) -> Result<Command, DecodeError> {
    check_version(header.version)?;
    decode("command", body)
}

/// Decodes the body of an event whose header says `header`.
///
/// # Errors
/// As [`decode_command`].
pub fn decode_event(header: &Header, body: &[u8]) -> Result<Event, DecodeError> {
    check_version(header.version)?;
    decode("event", body)
}

/// The bytes of a handshake message to a worker.
pub fn encode_boot_down(message: &BootDown) -> Vec<u8> {
    boot(message)
}

/// The bytes of a handshake message to an executor.
pub fn encode_boot_up(message: &BootUp) -> Vec<u8> {
    boot(message)
}

/// Decodes a handshake message to a worker.
///
/// # Errors
/// Another version, an unknown kind, a damaged or a longer body.
pub fn decode_boot_down(message: &[u8]) -> Result<BootDown, DecodeError> {
    unboot("handshake message to a worker", message)
}

/// Decodes a handshake message to an executor.
///
/// # Errors
/// As [`decode_boot_down`].
pub fn decode_boot_up(message: &[u8]) -> Result<BootUp, DecodeError> {
    unboot("handshake message to an executor", message)
}

/// A handshake message is the version, little-endian, then the body.
fn boot<T: Serialize>(message: &T) -> Vec<u8> {
    let mut bytes = PROTOCOL_VERSION.to_le_bytes().to_vec();
    append(&mut bytes, message);
    bytes
}

fn unboot<T: DeserializeOwned>(what: &'static str, message: &[u8]) -> Result<T, DecodeError> {
    let Some((version, body)) = message.split_first_chunk::<2>() else {
        return Err(DecodeError::TooShort {
            message_bytes: message.len(),
            header_bytes: 2,
        });
    };
    check_version(u16::from_le_bytes(*version))?;
    decode(what, body)
}

/// A body alone, for replies whose bytes are a blob.
pub(crate) fn body<T: Serialize>(value: &T) -> Vec<u8> {
    let mut bytes = Vec::new();
    append(&mut bytes, value);
    bytes
}

fn check_version(theirs: u16) -> Result<(), DecodeError> {
    if theirs == PROTOCOL_VERSION {
        return Ok(());
    }
    Err(DecodeError::WrongVersion {
        theirs,
        ours: PROTOCOL_VERSION,
    })
}

fn append<T: Serialize>(bytes: &mut Vec<u8>, value: &T) {
    // Writing to a Vec cannot fail, and these types (no maps, no sequences of unknown length) are all representable; were one not,
    // the peer would refuse the empty message.
    *bytes = postcard::to_extend(value, std::mem::take(bytes)).unwrap_or_default();
}

pub(crate) fn decode<T: DeserializeOwned>(what: &'static str, body: &[u8]) -> Result<T, DecodeError> {
    if body.len() > MAX_MESSAGE_BYTES {
        return Err(DecodeError::TooLong {
            message_bytes: body.len(),
            limit_bytes: MAX_MESSAGE_BYTES,
        });
    }
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        Ok((_, extra)) => Err(DecodeError::Trailing {
            what,
            extra_bytes: extra.len(),
        }),
        Err(error) => Err(DecodeError::Corrupt {
            what,
            body_bytes: body.len(),
            reason: error.to_string(),
        }),
    }
}
