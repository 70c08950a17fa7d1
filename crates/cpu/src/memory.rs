//! Memory that kernels work in.

use std::ops::{Deref, DerefMut, Range};

/// Numbers on a cache line boundary, so that a vector never straddles two lines.
#[derive(Debug, Default)]
pub(crate) struct Aligned {
    lines: Vec<Line>,
    len: usize,
}

#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([f32; 16]);

impl Aligned {
    /// Makes room for at least `len` numbers. What they are is unspecified. Never shrinks.
    pub(crate) fn reserve(&mut self, len: usize) {
        if len > self.len {
            reserve(&mut self.lines, len.div_ceil(16), Line([0.0; 16]));
            self.len = len;
        }
    }

    /// Numbers there is room for.
    pub(crate) fn capacity(&self) -> usize {
        self.len
    }
}

impl Deref for Aligned {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: lines are arrays of f32 without padding, and `len` numbers lie in them.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

/// The same memory as pairs of small integers.
pub(crate) fn as_integers(numbers: &mut [f32]) -> &mut [i16] {
    // SAFETY: two integers lie in each number, aligned at least as they must be; every bit pattern is one of
    // either.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), 2 * numbers.len()) }
}

/// Makes room for at least `len` values. What they are is unspecified. Never shrinks.
pub(crate) fn reserve<T: Copy>(values: &mut Vec<T>, len: usize, value: T) {
    if len > values.len() {
        // Growing would copy.
        *values = Vec::with_capacity(len);
        model::prefer_huge_pages(values.spare_capacity_mut());
        values.resize(len, value);
    }
}

/// Numbers that parts of these lengths take in a block.
pub(crate) fn carved_len(lens: &[usize]) -> usize {
    lens.iter().map(|len| len.next_multiple_of(16)).sum()
}

/// Cuts a block into parts of these lengths, each on a cache line boundary.
pub(crate) fn carve<const N: usize>(block: &mut [f32], lens: [usize; N]) -> [&mut [f32]; N] {
    let mut rest = block;
    lens.map(|len| {
        let (part, behind) = std::mem::take(&mut rest).split_at_mut(len.next_multiple_of(16));
        rest = behind;
        &mut part[..len]
    })
}

/// A matrix that threads read: rows `stride` numbers apart, perhaps chosen by an index.
#[derive(Debug)]
pub(crate) struct Rows<'a, T = f32> {
    numbers: &'a [T],
    stride: usize,
    count: usize,
    index: Option<&'a [u32]>,
}

impl<T> Clone for Rows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Rows<'_, T> {}

impl<'a, T> Rows<'a, T> {
    /// `count` rows, `stride` apart, of at most `stride` columns.
    pub(crate) fn new(numbers: &'a [T], stride: usize, count: usize) -> Rows<'a, T> {
        Rows { numbers, stride, count, index: None }
    }

    /// The rows that `index` names.
    pub(crate) fn gather(numbers: &'a [T], stride: usize, index: &'a [u32]) -> Rows<'a, T> {
        Rows { numbers, stride, count: index.len(), index: Some(index) }
    }

    /// Some of the rows, which lie one after the other.
    pub(crate) fn part(&self, rows: Range<usize>) -> Rows<'a, T> {
        match self.index {
            None => Rows { numbers: &self.numbers[rows.start * self.stride..], count: rows.len(), ..*self },
            Some(index) => Rows { count: rows.len(), index: Some(&index[rows]), ..*self },
        }
    }

    /// Number of rows.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Row `i`, as many columns as rows are apart.
    pub(crate) fn whole_row(&self, i: usize) -> &'a [T] {
        self.row(i, self.stride)
    }

    /// The first `cols` columns of row `i`.
    pub(crate) fn row(&self, i: usize, cols: usize) -> &'a [T] {
        let row = self.index.map_or(i, |index| index[i] as usize);
        &self.numbers[row * self.stride..][..cols]
    }
}

/// A matrix that threads write, each its own part.
///
/// Kernels write columns of rows that lie interleaved with those of other threads, which slices cannot
/// express.
#[derive(Debug)]
pub(crate) struct Out<T = f32> {
    start: *mut T,
    len: usize,
    stride: usize,
}

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

// SAFETY: access goes through `Out::part`, whose callers promise disjoint parts.
unsafe impl<T: Send> Send for Out<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Out<T> {}

impl<T> Out<T> {
    /// Rows `stride` apart. The numbers must outlive every use; a region borrows nothing longer.
    pub(crate) fn new(numbers: &mut [T], stride: usize) -> Out<T> {
        Out { start: numbers.as_mut_ptr(), len: numbers.len(), stride }
    }

    /// Where a number lies, to be handed to a kernel.
    ///
    /// # Panics
    /// If it does not lie inside.
    pub(crate) fn at(&self, row: usize, column: usize) -> *mut T {
        let index = row * self.stride + column;
        assert!(index < self.len, "outside of the matrix");
        // SAFETY: inside the numbers this was made of.
        unsafe { self.start.add(index) }
    }

    /// `len` columns of a row from `column` on.
    ///
    /// # Safety
    /// The numbers behind this must be alive, and nobody else may use this part while the slice lives.
    ///
    /// # Panics
    /// If the part does not lie inside.
    #[allow(clippy::mut_from_ref)] // the caller's promise
    pub(crate) unsafe fn part(&self, row: usize, column: usize, len: usize) -> &mut [T] {
        let start = row * self.stride + column;
        assert!(start + len <= self.len, "outside of the matrix");
        // SAFETY: inside the numbers this was made of; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}
