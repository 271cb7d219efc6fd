//! What travels, and to whom.

use denoised_ring::ArenaLease;
use denoised_types::Rank;
use denoised_wire::BlobIdx;
use std::{fmt, ops::Deref};

/// A set of ranks below 64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RankSet(u64);

impl RankSet {
    /// Nobody.
    pub const EMPTY: Self = Self(0);

    /// Ranks `0..world_size`, at most 64.
    pub const fn all(world_size: u16) -> Self {
        if world_size >= 64 {
            Self(u64::MAX)
        } else {
            Self((1 << world_size) - 1)
        }
    }

    /// One rank; nobody for a rank of 64 or above.
    pub const fn one(rank: Rank) -> Self {
        if rank.0 < 64 { Self(1 << rank.0) } else { Self(0) }
    }

    /// The set with these bits, lowest rank first.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// A bit per rank, lowest first.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether `rank` is in it.
    pub const fn contains(self, rank: Rank) -> bool {
        self.0 & Self::one(rank).0 != 0
    }

    /// Adds a rank; false if it was there.
    pub fn insert(&mut self, rank: Rank) -> bool {
        let before = self.0;
        self.0 |= Self::one(rank).0;
        before != self.0
    }

    /// Those in `self` but not in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Those in both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// How many.
    pub const fn n_ranks(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether nobody is in it.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The ranks, ascending.
    pub fn iter(self) -> impl Iterator<Item = Rank> {
        (0..64u16).filter(move |idx| self.0 >> idx & 1 == 1).map(Rank)
    }
}

impl FromIterator<Rank> for RankSet {
    fn from_iter<I: IntoIterator<Item = Rank>>(ranks: I) -> Self {
        ranks
            .into_iter()
            .fold(Self::EMPTY, |set, rank| Self(set.0 | Self::one(rank).0))
    }
}

/// Bytes that came with a message: owned, or lying in the sender's arena until this is dropped.
pub struct Blob(Repr);

enum Repr {
    Owned(Vec<u8>),
    Leased(ArenaLease),
}

impl From<Vec<u8>> for Blob {
    fn from(bytes: Vec<u8>) -> Self {
        Self::owned(bytes)
    }
}

impl Default for Blob {
    /// No bytes.
    fn default() -> Self {
        Self::owned(Vec::new())
    }
}

impl Blob {
    pub(crate) fn owned(bytes: Vec<u8>) -> Self {
        Self(Repr::Owned(bytes))
    }

    pub(crate) fn leased(lease: ArenaLease) -> Self {
        Self(Repr::Leased(lease))
    }

    /// The bytes as one's own; copies them if they lie in an arena.
    pub fn into_vec(self) -> Vec<u8> {
        match self.0 {
            Repr::Owned(bytes) => bytes,
            Repr::Leased(lease) => lease.to_vec(),
        }
    }
}

impl Blob {
    /// Bytes of the sender's arena that this keeps from being used again; 0 for owned bytes.
    pub fn held_bytes(&self) -> usize {
        match &self.0 {
            Repr::Owned(_) => 0,
            Repr::Leased(lease) => lease.held_bytes(),
        }
    }

    /// Whether it holds nothing of the second half of an arena: of owned bytes always true.
    pub fn is_in_first_half(&self) -> bool {
        match &self.0 {
            Repr::Owned(_) => true,
            Repr::Leased(lease) => lease.end_granule() <= lease.n_granules() / 2,
        }
    }
}

impl Deref for Blob {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Repr::Owned(bytes) => bytes,
            Repr::Leased(lease) => lease,
        }
    }
}

impl fmt::Debug for Blob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.0 {
            Repr::Owned(_) => "owned",
            Repr::Leased(_) => "in the arena",
        };
        write!(f, "Blob({} bytes, {kind})", self.len())
    }
}

/// A message as it arrived.
#[derive(Debug)]
pub struct Received {
    /// Header and body.
    pub message: Blob,
    /// What the body refers to by index.
    pub blobs: Vec<Blob>,
}

impl Received {
    /// The blob with this index, if the message has it.
    pub fn blob(&self, blob: BlobIdx) -> Option<&[u8]> {
        self.blobs.get(usize::from(blob.0)).map(|blob| &**blob)
    }

    /// Puts bytes in the place of the blob with this index, if the message has it.
    pub fn put_blob(&mut self, blob: BlobIdx, bytes: Vec<u8>) {
        if let Some(place) = self.blobs.get_mut(usize::from(blob.0)) {
            *place = Blob::owned(bytes);
        }
    }

    /// Takes the blob with this index out, where it lies; a second time it is empty.
    pub fn take(&mut self, blob: BlobIdx) -> Option<Blob> {
        self.blobs.get_mut(usize::from(blob.0)).map(std::mem::take)
    }

    /// As [`Received::take`], as bytes of one's own.
    pub fn take_blob(&mut self, blob: BlobIdx) -> Option<Vec<u8>> {
        self.take(blob).map(Blob::into_vec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_sets_hold_ranks_below_64() {
        assert_eq!(
            RankSet::all(3).iter().collect::<Vec<_>>(),
            [Rank(0), Rank(1), Rank(2)]
        );
        assert_eq!(RankSet::all(64).n_ranks(), 64);
        assert!(RankSet::one(Rank(64)).is_empty());
        let mut set: RankSet = [Rank(5), Rank(1)].into_iter().collect();
        assert!(set.contains(Rank(5)) && !set.contains(Rank(0)));
        assert!(!set.insert(Rank(1)) && set.insert(Rank(2)));
        assert_eq!(set.without(RankSet::one(Rank(5))).bits(), 0b110);
        assert!(set.and(RankSet::one(Rank(63))).is_empty());
    }
}
