//! Which reads fill a slot. An expert is some *runs*, bytes that lie together in a file and together in the slot: each slice of
//! a GGUF file is one, a packed expert is one altogether. A run longer than a chunk is cut into *pieces*, a job each, so that
//! one miss alone keeps several reads in flight.
//!
//! ```text
//! file   ….[======|==================|=====.====|====]…     [ ] = the run, | = block borders, . = where slices meet (packed)
//! pieces    0               1                   2           cut at block borders: no block is read twice, and each piece
//!                                                           but the last ends where direct reads may end
//! ```
//!
//! Borders depend on where an expert's run begins within a block, the number of pieces does not: it is made once, at open.

use std::ops::Range;

use super::slots::MAX_PIECES;
use crate::error::{Result, err};

/// Bytes that lie together in a file and in the slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub file: usize,
    /// Of expert 0, from the start of the file.
    pub offset_bytes: u64,
    /// In the file, from an expert to the next.
    pub stride_bytes: u64,
    pub len_bytes: u64,
    /// From the slot's start.
    pub in_slot: u64,
    /// Of the file: what offsets and lengths of direct reads are multiples of.
    pub block: u64,
    /// Of the file: what addresses are.
    pub mem_align: u64,
}

/// One read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    run: usize,
    /// From the run's start, before they are moved down to a block's border; the ends of the run stay where they are.
    from: u64,
    to: u64,
    /// The slices that wait for it. One whose bytes only come near its ends may be among them.
    pub slices: Range<u32>,
    /// Which of its run's it is, and of how many.
    pub number: (usize, usize),
}

/// What is read for any expert of one layer.
#[derive(Clone, Debug)]
pub(super) struct LayerPieces {
    runs: Vec<Run>,
    pieces: Vec<Piece>,
    /// By slice, the pieces that it waits for.
    pub of_slice: Vec<u32>,
}

impl LayerPieces {
    /// `slices`: place in the slot and length, each inside one run. `chunk_bytes`: runs beyond it are cut into pieces of about
    /// equal size, at most so large; 0: none is.
    pub fn new(runs: Vec<Run>, slices: &[Range<u64>], chunk_bytes: u64) -> Result<LayerPieces> {
        let mut pieces = Vec::new();
        for (index, run) in runs.iter().enumerate() {
            let step = run.block.max(run.mem_align);
            let wanted = if chunk_bytes == 0 { 1 } else { run.len_bytes.div_ceil(chunk_bytes) };
            let chunk = run.len_bytes.div_ceil(wanted).next_multiple_of(step);
            let n = run.len_bytes.div_ceil(chunk);
            if pieces.len() as u64 + n > MAX_PIECES as u64 {
                return Err(err!(
                    Argument,
                    "chunks of {chunk_bytes} bytes cut an expert's {} bytes into more than {MAX_PIECES} reads",
                    run.len_bytes
                ));
            }
            for i in 0..n {
                let (from, to) = (i * chunk, ((i + 1) * chunk).min(run.len_bytes));
                let near = run.in_slot + from.saturating_sub(run.block)..run.in_slot + to;
                let waits = |s: &Range<u64>| s.start < near.end && s.end > near.start;
                // a piece of padding alone counts as the last slice's
                let first = slices.iter().position(waits).unwrap_or(slices.len().saturating_sub(1));
                let end = slices.iter().rposition(waits).unwrap_or(first) + 1;
                let slices = first as u32..end as u32;
                pieces.push(Piece { run: index, from, to, slices, number: (i as usize, n as usize) });
            }
        }
        let of_slice = |i: u32| pieces.iter().filter(|p| p.slices.contains(&i)).count() as u32;
        let of_slice = (0..slices.len() as u32).map(of_slice).collect();
        Ok(LayerPieces { runs, pieces, of_slice })
    }

    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    pub fn get(&self, piece: u32) -> &Piece {
        &self.pieces[piece as usize]
    }

    /// The run that a piece is cut from, and for one expert: offset in the file, offset in the slot, bytes.
    pub fn place(&self, piece: u32, expert: u32) -> (&Run, u64, u64, u64) {
        let p = self.get(piece);
        let run = &self.runs[p.run];
        let start = run.offset_bytes + run.stride_bytes * u64::from(expert);
        let before = start % run.block;
        // no border reaches the run's start: a chunk is at least a block
        let from = if p.from == 0 { 0 } else { p.from - before };
        let to = if p.to == run.len_bytes { p.to } else { p.to - before };
        (run, start + from, run.in_slot + from, to - from)
    }

    /// Bytes of all experts that direct reads bring straight into slots, and those that take the way through a bounce buffer.
    /// Heads and tails of less than a block count as the run that they belong to.
    pub fn straight_and_bounced(&self, n_experts: u32) -> (u64, u64) {
        let mut sums = (0, 0);
        for (run, expert) in self.runs.iter().flat_map(|r| (0..n_experts).map(move |e| (r, e))) {
            let start = run.offset_bytes + run.stride_bytes * u64::from(expert);
            let head = start.next_multiple_of(run.block) - start;
            let straight = (run.in_slot + head) % run.mem_align == 0 && run.len_bytes >= head + run.block;
            *if straight { &mut sums.0 } else { &mut sums.1 } += run.len_bytes;
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(offset_bytes: u64, len_bytes: u64, block: u64, in_slot: u64) -> Run {
        Run { file: 0, offset_bytes, stride_bytes: len_bytes, len_bytes, in_slot, block, mem_align: block }
    }

    proptest! {
        /// Whatever the sizes: the pieces of an expert are its run, once, and inner borders are block borders.
        #[test]
        fn pieces_are_the_run(
            offset in 0..100_000u64, len in 1..2_000_000u64, shift in 0..13u32, chunk in prop_oneof![Just(0), 1..600_000u64],
            expert in 0..5u32, meet in any::<prop::sample::Index>(),
        ) {
            let block = 1 << shift;
            let meet = meet.index(len as usize) as u64;
            let slices = [64..64 + meet, 64 + meet..64 + len];
            let p = LayerPieces::new(vec![run(offset, len, block, 64)], &slices, chunk).unwrap();
            let start = offset + len * u64::from(expert);
            let mut at = start;
            let mut counted = [0u32; 2];
            for i in 0..p.len() as u32 {
                let (_, from, in_slot, n) = p.place(i, expert);
                prop_assert_eq!(from, at);
                prop_assert_eq!(in_slot, 64 + from - start);
                prop_assert!(n > 0 && (from == start || from % block == 0));
                prop_assert!(chunk == 0 || n <= chunk.next_multiple_of(block) + block);
                at += n;
                for (s, range) in slices.iter().enumerate() {
                    let waits = p.get(i).slices.contains(&(s as u32));
                    counted[s] += u32::from(waits);
                    prop_assert!(waits || range.is_empty() || range.end <= in_slot || range.start >= in_slot + n);
                }
            }
            prop_assert_eq!(at, start + len);
            prop_assert_eq!(&p.of_slice[..], &counted[..]);
        }
    }

    #[test]
    fn a_piece_of_padding_alone_belongs_to_the_last_slice() {
        let p = LayerPieces::new(vec![run(0, 16384 * 9, 4096, 0)], &[0..100, 128..16384 * 8], 16384).unwrap();
        assert_eq!((p.get(0).slices.clone(), p.get(8).slices.clone()), (0..2, 1..2));
        assert_eq!((p.of_slice[0], p.of_slice[1]), (1, 9));
    }

    #[test]
    fn straight_where_memory_and_file_are_in_step() {
        let of =
            |r: Run, n| LayerPieces::new(vec![r], std::slice::from_ref(&(0..1)), 0).unwrap().straight_and_bounced(n);
        assert_eq!(of(run(4096 + 512, 8192, 4096, 512), 3), (3 * 8192, 0));
        assert_eq!(of(run(4096 + 512, 8192, 4096, 0), 3), (0, 3 * 8192));
        // every other expert of 1.5 blocks is out of step
        assert_eq!(of(run(0, 6144, 4096, 0), 4), (2 * 6144, 2 * 6144));
        assert_eq!(of(run(0, 100, 4096, 0), 1), (0, 100));
        // buffered: every place is as good
        assert_eq!(of(run(3, 100, 1, 5), 1), (100, 0));
    }

    #[test]
    fn too_many_pieces_are_refused_with_the_numbers() {
        let e = LayerPieces::new(vec![run(0, 1 << 30, 512, 0)], std::slice::from_ref(&(0..1 << 30)), 512).unwrap_err();
        assert!(e.detail.contains("512 bytes") && e.detail.contains("1073741824"), "{e}");
    }
}
