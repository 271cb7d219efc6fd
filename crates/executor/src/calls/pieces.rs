//! Blobs that come in pieces because they are too large for an arena.

use denoised_link::Received;
use denoised_types::{Failure, FailureCode, Rank};
use denoised_wire::BlobIdx;

/// What the ranks of one call have sent in pieces so far, each for the event of that call that follows.
#[derive(Debug, Default)]
pub(crate) struct Pieces(Vec<RankPieces>);

#[derive(Debug)]
struct RankPieces {
    rank: Rank,
    blobs: Vec<(BlobIdx, Vec<u8>)>,
    n_bytes: u64,
}

impl Pieces {
    /// Takes one more of `rank`; what exceeds the limit is only counted.
    pub(crate) fn take(&mut self, rank: Rank, of: BlobIdx, received: &Received, limit_bytes: u64) {
        let pieces_idx = match self.0.iter().position(|pieces| pieces.rank == rank) {
            Some(idx) => idx,
            None => {
                self.0.push(RankPieces {
                    rank,
                    blobs: Vec::new(),
                    n_bytes: 0,
                });
                self.0.len() - 1
            }
        };
        let RankPieces { blobs, n_bytes, .. } = &mut self.0[pieces_idx];
        let piece = received.blob(BlobIdx(0)).unwrap_or_default();
        *n_bytes = n_bytes.saturating_add(piece.len() as u64);
        if *n_bytes > limit_bytes {
            *blobs = Vec::new();
            return;
        }
        match blobs.last_mut() {
            Some((last, bytes)) if *last == of => bytes.extend_from_slice(piece),
            // Blobs come one after the other and are not empty, so there are few of them.
            Some((last, _)) if last.0 > of.0 => {}
            _ if piece.is_empty() => {}
            _ => blobs.push((of, piece.to_vec())),
        }
    }

    /// Puts what `rank` has sent so far in its places.
    ///
    /// # Errors
    /// It was more than the limit.
    pub(crate) fn put(
        &mut self,
        rank: Rank,
        received: &mut Received,
        limit_bytes: u64,
    ) -> Result<(), Failure> {
        let Some(pieces_idx) = self.0.iter().position(|pieces| pieces.rank == rank) else {
            return Ok(());
        };
        let RankPieces { blobs, n_bytes, .. } = self.0.swap_remove(pieces_idx);
        if n_bytes > limit_bytes {
            let text = format!("a result of {n_bytes} bytes exceeds the limit of {limit_bytes} bytes");
            return Err(Failure::new(FailureCode::OutOfMemory, text).on_rank(rank));
        }
        for (blob, bytes) in blobs {
            received.put_blob(blob, bytes);
        }
        Ok(())
    }
}
