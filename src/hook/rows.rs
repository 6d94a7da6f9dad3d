//! Rows of scores, ids and weights as an engine has them: a token a row, with whatever distance between rows. The C border
//! makes such views of pointers and strides; here they are only read and written by row.

/// `token` is below the batch's `n_tokens`; each row has as many elements as the call needs.
pub trait Rows<T> {
    fn row(&self, token: usize) -> &[T];
}

pub trait RowsMut<T>: Rows<T> {
    fn row_mut(&mut self, token: usize) -> &mut [T];
}

/// Rows one behind the other, for callers in Rust.
pub struct Adjacent<'a, T> {
    pub data: &'a mut [T],
    pub width: usize,
}

impl<T> Rows<T> for Adjacent<'_, T> {
    fn row(&self, token: usize) -> &[T] {
        &self.data[token * self.width..][..self.width]
    }
}

impl<T> RowsMut<T> for Adjacent<'_, T> {
    fn row_mut(&mut self, token: usize) -> &mut [T] {
        &mut self.data[token * self.width..][..self.width]
    }
}
