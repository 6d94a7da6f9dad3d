//! The reference's logits, a row a token: in memory if they fit, else in a temporary file without a name.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, Write};

use anyhow::{Context, Result, bail};

pub struct Kept {
    n_vocab: usize,
    n_rows: usize,
    place: Place,
}

enum Place {
    Memory(Vec<f32>),
    File(BufWriter<File>),
}

impl Kept {
    /// Room for up to `n_tokens` rows: memory if they take at most `limit_bytes`.
    pub fn new(n_tokens: usize, n_vocab: usize, limit_bytes: u64) -> Result<Self> {
        let bytes = n_tokens as u64 * n_vocab as u64 * 4;
        let place = if bytes <= limit_bytes {
            Place::Memory(Vec::with_capacity(n_tokens * n_vocab))
        } else {
            let why = || format!("a temporary file for {bytes} bytes of logits");
            Place::File(BufWriter::with_capacity(1 << 20, tempfile::tempfile().with_context(why)?))
        };
        Ok(Self { n_vocab, n_rows: 0, place })
    }

    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    pub fn push(&mut self, row: &[f32]) -> Result<()> {
        if row.len() != self.n_vocab {
            bail!("{} logits, {} words", row.len(), self.n_vocab);
        }
        match &mut self.place {
            Place::Memory(all) => all.extend_from_slice(row),
            Place::File(file) => {
                for x in row {
                    file.write_all(&x.to_le_bytes()).context("the temporary file for logits")?;
                }
            }
        }
        self.n_rows += 1;
        Ok(())
    }

    /// All of them, from the first.
    pub fn rows(&mut self) -> Result<Rows<'_>> {
        let source = match &mut self.place {
            Place::Memory(all) => Source::Memory(all.chunks_exact(self.n_vocab)),
            Place::File(file) => {
                file.flush().and_then(|()| file.get_mut().rewind()).context("the temporary file for logits")?;
                Source::File(BufReader::with_capacity(1 << 20, file.get_mut()), vec![0; self.n_vocab * 4])
            }
        };
        Ok(Rows { source, row: vec![0.0; self.n_vocab] })
    }
}

pub struct Rows<'a> {
    source: Source<'a>,
    row: Vec<f32>,
}

enum Source<'a> {
    Memory(std::slice::ChunksExact<'a, f32>),
    File(BufReader<&'a mut File>, Vec<u8>),
}

impl Rows<'_> {
    pub fn next(&mut self) -> Result<&[f32]> {
        match &mut self.source {
            Source::Memory(rows) => rows.next().context("more tokens than the reference had"),
            Source::File(file, bytes) => {
                file.read_exact(bytes).context("the temporary file for logits")?;
                for (x, b) in self.row.iter_mut().zip(bytes.chunks_exact(4)) {
                    *x = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
                Ok(&self.row)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Kept, Place};

    #[test]
    fn rows_come_back_bit_for_bit_from_either_place_and_more_than_once() {
        let row = |i: usize| [i as f32 * 0.1, f32::NEG_INFINITY, -0.0, f32::MIN_POSITIVE / 2.0].map(f32::to_bits);
        for limit in [0, 5 * 16 - 1, 5 * 16] {
            let mut kept = Kept::new(5, 4, limit).unwrap();
            assert_eq!(matches!(kept.place, Place::Memory(_)), limit == 80);
            (0..5).for_each(|i| kept.push(&row(i).map(f32::from_bits)).unwrap());
            assert!(kept.push(&[1.0]).is_err());
            for _ in 0..2 {
                let mut rows = kept.rows().unwrap();
                for i in 0..5 {
                    assert!(rows.next().unwrap().iter().map(|x| x.to_bits()).eq(row(i)));
                }
                assert!(rows.next().is_err());
            }
            assert_eq!(kept.n_rows(), 5);
        }
    }
}
