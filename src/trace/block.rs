//! A token on its way to the trace: what a block of the recorder's spool holds, and the words for it.
//!
//! The recorder writes records and row ranges into the places that [`Layout`] gives, and a [`TokenMeta`] behind them;
//! the writer thread takes them apart again. Blocks never leave the process.

use std::ops::Range;

/// What a pass is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Prefill,
    Decode,
}

/// Where the experts of a pass were computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The arena's slots: the pass used, and changed, what is resident.
    Slots,
    /// The mapped file, because the batch did not fit: what is resident stayed as it was.
    PassThrough,
    /// The mapped file as the cache itself: residency is the page cache's, steered by hints.
    Mapped,
}

impl Phase {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Prefill, Self::Decode].into_iter().find(|p| p.as_str() == name)
    }
}

impl Placement {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Slots => "slots",
            Self::PassThrough => "pass_through",
            Self::Mapped => "mapped",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Slots, Self::PassThrough, Self::Mapped].into_iter().find(|p| p.as_str() == name)
    }
}

/// Where the parts of a block lie: records, ranges, meta data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub n_layers: usize,
    pub top_m: usize,
    pub row_range: bool,
}

impl Layout {
    pub fn record_bytes(&self) -> usize {
        4 * self.top_m
    }

    /// Bytes of a token's records, which are the block's first.
    pub fn records(&self) -> usize {
        self.n_layers * self.record_bytes()
    }

    /// Bytes of a token's row ranges, which follow.
    pub fn ranges(&self) -> usize {
        if self.row_range { 4 * self.n_layers } else { 0 }
    }

    /// Bytes of a whole block, or `None` if no machine word holds them.
    pub fn block(&self) -> Option<usize> {
        self.n_layers
            .checked_mul(self.record_bytes().checked_add(5)?)?
            .checked_add(TokenMeta::FIXED)
            .filter(|&n| n <= isize::MAX as usize)
            .map(|_| self.records() + self.ranges() + TokenMeta::FIXED + self.n_layers)
    }

    #[inline]
    pub fn record(&self, layer: usize) -> Range<usize> {
        let size = self.record_bytes();
        layer * size..(layer + 1) * size
    }

    #[inline]
    pub fn range(&self, layer: usize) -> Range<usize> {
        let at = self.records() + 4 * layer;
        at..at + 4
    }
}

/// What a block says about its token, for the sidecar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenMeta {
    pub phase: Phase,
    /// This token's; negative = not known.
    pub position: i64,
    pub tokens_per_pass: u32,
    /// This token's place in its pass.
    pub index: u32,
    /// The first token of the pass that is recorded.
    pub first: u32,
}

impl TokenMeta {
    const FIXED: usize = 1 + 8 + 4 + 4 + 4;

    /// Into the end of a block: the fixed part, then a byte a layer for the placement.
    pub fn encode(&self, placement: &[Placement], out: &mut [u8]) {
        let (fixed, layers) = out.split_at_mut(Self::FIXED);
        fixed[0] = (self.phase == Phase::Decode).into();
        fixed[1..9].copy_from_slice(&self.position.to_le_bytes());
        fixed[9..13].copy_from_slice(&self.tokens_per_pass.to_le_bytes());
        fixed[13..17].copy_from_slice(&self.index.to_le_bytes());
        fixed[17..21].copy_from_slice(&self.first.to_le_bytes());
        let code = |p: &Placement| *p as u8;
        match placement {
            [one] => layers.fill(code(one)),
            each => layers.iter_mut().zip(each).for_each(|(out, p)| *out = code(p)),
        }
    }

    /// The same back, with the placement's bytes. `None` if there are too few.
    pub fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (fixed, layers) = bytes.split_at_checked(Self::FIXED)?;
        let u32_at = |at: usize| Some(u32::from_le_bytes(*fixed[at..].first_chunk()?));
        let meta = Self {
            phase: if fixed[0] == 1 { Phase::Decode } else { Phase::Prefill },
            position: i64::from_le_bytes(*fixed[1..].first_chunk()?),
            tokens_per_pass: u32_at(9)?,
            index: u32_at(13)?,
            first: u32_at(17)?,
        };
        Some((meta, layers))
    }
}

/// What a byte of a block's end stands for.
pub(super) fn placement_of(code: u8) -> Placement {
    [Placement::Slots, Placement::PassThrough, Placement::Mapped][usize::from(code.min(2))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meta_data_round_trip() {
        let meta = TokenMeta { phase: Phase::Prefill, position: i64::MIN, tokens_per_pass: 9, index: 3, first: 2 };
        let mut bytes = [0; TokenMeta::FIXED + 3];
        let each = [Placement::Mapped, Placement::Slots, Placement::PassThrough];
        meta.encode(&each, &mut bytes);
        let (back, layers) = TokenMeta::decode(&bytes).unwrap();
        assert_eq!(back, meta);
        assert_eq!(layers.iter().map(|&code| placement_of(code)).collect::<Vec<_>>(), each);
        assert_eq!(TokenMeta::decode(&bytes[..9]), None);
    }

    #[test]
    fn a_layout_is_a_partition() {
        let layout = Layout { n_layers: 2, top_m: 3, row_range: true };
        assert_eq!((layout.record(1), layout.range(0), layout.range(1)), (12..24, 24..28, 28..32));
        assert_eq!(layout.block(), Some(32 + TokenMeta::FIXED + 2));
        assert_eq!(Layout { row_range: false, ..layout }.block(), Some(24 + TokenMeta::FIXED + 2));
        assert_eq!(Layout { n_layers: usize::MAX / 4, ..layout }.block(), None);
    }
}
