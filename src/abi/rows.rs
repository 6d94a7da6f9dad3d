//! An engine's rows: a pointer and a stride, seen as the hook's `Rows`.

use std::marker::PhantomData;

use crate::error::{Result, err};
use crate::hook::{Rows, RowsMut};

pub struct Strided<'a, T> {
    base: *mut T,
    stride_bytes: usize,
    width: usize,
    n_rows: usize,
    life: PhantomData<&'a mut [T]>,
}

impl<T> Strided<'_, T> {
    /// `n_rows` rows of `width` elements, `stride_bytes` apart. `Argument` for what cannot be rows; without rows anything will do.
    ///
    /// # Safety
    /// The memory is the caller's for as long as the value lives, initialised, and no row is used otherwise meanwhile. Where `row_mut`
    /// is called it is writable.
    pub unsafe fn new(what: &str, base: *mut T, stride_bytes: usize, width: usize, n_rows: usize) -> Result<Self> {
        if n_rows > 0 {
            let row_bytes = width.saturating_mul(size_of::<T>());
            let all = stride_bytes.checked_mul(n_rows - 1).and_then(|n| n.checked_add(row_bytes));
            if base.is_null() || !base.is_aligned() {
                return Err(err!(Argument, "{what}: {base:p} is no array of {}-byte elements", size_of::<T>()));
            }
            if n_rows > 1 && (stride_bytes < row_bytes || stride_bytes % align_of::<T>() != 0)
                || all.is_none_or(|n| n > isize::MAX as usize)
            {
                return Err(err!(
                    Argument,
                    "{what}: {n_rows} rows of {row_bytes} bytes cannot be {stride_bytes} bytes apart"
                ));
            }
        }
        Ok(Self { base, stride_bytes, width, n_rows, life: PhantomData })
    }

    fn at(&self, row: usize) -> *mut T {
        assert!(row < self.n_rows, "row {row} of {}", self.n_rows);
        // SAFETY: `new` has checked that all rows lie within isize::MAX bytes of the base.
        unsafe { self.base.byte_add(row * self.stride_bytes) }
    }
}

impl<T> Rows<T> for Strided<'_, T> {
    fn row(&self, row: usize) -> &[T] {
        // SAFETY: inside what `new` was promised.
        unsafe { std::slice::from_raw_parts(self.at(row), self.width) }
    }
}

impl<T> RowsMut<T> for Strided<'_, T> {
    fn row_mut(&mut self, row: usize) -> &mut [T] {
        // SAFETY: inside what `new` was promised, and rows do not overlap.
        unsafe { std::slice::from_raw_parts_mut(self.at(row), self.width) }
    }
}
