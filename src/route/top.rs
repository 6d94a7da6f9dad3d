//! The m largest of n scores, in a microsecond: the SIMD leaf of `candidates`.
//!
//! Scores become integer keys of the same order. A threshold that a little more than m keys reach is found by counting
//! passes, which compile to vector compares; what reaches it is gathered, ranked by counting again, and cut to m. The
//! threshold of the last call is tried first: the same layer's next token, or the next layer, has much the same one.

/// Below every key of a number.
pub const NAN: i32 = i32::MIN;

/// Orders like the score, NaN below everything; -0 and 0 are equal, as they are to the router.
#[inline(always)]
pub fn key(z: f32) -> i32 {
    let bits = (z + 0.0).to_bits() as i32;
    if z.is_nan() { NAN } else { bits ^ ((bits >> 31) & i32::MAX) }
}

/// The score of a key.
#[inline(always)]
pub fn score(key: i32) -> f32 {
    f32::from_bits((key ^ ((key >> 31) & i32::MAX)) as u32)
}

/// Working memory, reused from call to call.
#[derive(Default)]
pub struct Top {
    keys: Vec<i32>,
    /// What reaches the threshold, in the order of ids: keys and ids.
    near_keys: Vec<i32>,
    near_ids: Vec<u16>,
    taken: Vec<bool>,
    order: Vec<u16>,
    hint: i32,
}

impl Top {
    /// The ids of the m largest scores of `row` into `ids` (m = `ids.len()`, at most `row.len()`), ties by lowest id, and the smallest
    /// and largest key of the row.
    pub fn select(&mut self, row: &[f32], ids: &mut [u16]) -> (i32, i32) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has the feature.
            return unsafe { self.select_avx2(row, ids) };
        }
        self.select_plain(row, ids)
    }

    /// The same code for wider vectors than x86-64 is sure to have.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn select_avx2(&mut self, row: &[f32], ids: &mut [u16]) -> (i32, i32) {
        self.select_plain(row, ids)
    }

    #[inline(always)]
    fn select_plain(&mut self, row: &[f32], ids: &mut [u16]) -> (i32, i32) {
        let (n, m) = (row.len(), ids.len());
        debug_assert!(m <= n && n <= usize::from(u16::MAX));
        self.keys.resize(n, 0);
        for (k, &z) in self.keys.iter_mut().zip(row) {
            *k = key(z);
        }
        let (mut low, mut high) = (i32::MAX, i32::MIN);
        for &k in &self.keys {
            low = low.min(k);
            high = high.max(k);
        }
        let threshold = if m < n { self.threshold(m, low, high) } else { low };
        self.hint = threshold;
        self.near_keys.resize(n + PAD, NAN);
        self.near_ids.resize(n + PAD, 0);
        let near = gather(&self.keys, threshold, &mut self.near_keys, &mut self.near_ids);
        self.rank(near, ids);
        (low, high)
    }

    /// A key that at least m keys reach, and not many more unless they are equal.
    #[inline(always)]
    fn threshold(&self, m: usize, low: i32, high: i32) -> i32 {
        let slack = m + m / 8;
        // At least m keys are >= low, fewer than m are > high: kept true.
        let (mut low, mut high) = (i64::from(low), i64::from(high));
        let (mut at_low, mut at_high) = (self.keys.len(), 0);
        let mut probe = i64::from(self.hint).clamp(low, high);
        for step in 0.. {
            if low >= high {
                break;
            }
            let count = self.keys.iter().map(|&k| i32::from(k >= probe as i32)).sum::<i32>() as usize;
            if count >= m {
                (low, at_low) = (probe, count);
                if count <= slack {
                    break;
                }
            } else {
                (high, at_high) = (probe - 1, count);
            }
            // By the counts at both ends, as long as that gets on; by halves otherwise.
            let width = high - low;
            let guess = width * (at_low as i64 - m as i64 - m as i64 / 16) / (at_low as i64 - at_high as i64).max(1);
            probe = low + if step < 5 { guess.clamp(width / 16, width) } else { (width + 1) / 2 }.max(1);
        }
        low as i32
    }

    /// The first m of what was gathered, by falling key, then by rising id.
    #[inline(always)]
    fn rank(&mut self, near: usize, ids: &mut [u16]) {
        if near > 192 {
            // Many equal keys, or many candidates: counting is quadratic.
            let keys = &self.near_keys[..near];
            self.order.clear();
            self.order.reserve(self.keys.len());
            self.order.extend(0..near as u16);
            self.order.sort_unstable_by_key(|&i| (std::cmp::Reverse(keys[i as usize]), i));
            ids.iter_mut().zip(&self.order).for_each(|(id, &i)| *id = self.near_ids[i as usize]);
            return;
        }
        // Whole vectors only: what pads them is above nothing.
        let padded = near.next_multiple_of(PAD);
        self.near_keys[near..padded].fill(NAN);
        let keys = &self.near_keys[..padded];
        self.taken.clear();
        // How many are near differs from row to row: room for all, once.
        self.taken.reserve(self.keys.len());
        self.taken.resize(near, false);
        for (&k, &id) in keys[..near].iter().zip(&self.near_ids) {
            let mut above = [0i32; PAD];
            for others in keys.chunks_exact(PAD) {
                for (count, &other) in above.iter_mut().zip(others) {
                    *count += i32::from(other > k);
                }
            }
            let mut rank = above.iter().sum::<i32>() as usize;
            // Equal keys count to the same rank: the first of them, whose id is the lowest, is there already.
            while self.taken[rank] {
                rank += 1;
            }
            self.taken[rank] = true;
            if let Some(place) = ids.get_mut(rank) {
                *place = id;
            }
        }
    }
}

/// Keys go by so many at a time.
const PAD: usize = 16;

/// Which of up to 8 keys reach the threshold, a bit each.
#[inline(always)]
fn reached(chunk: &[i32], threshold: i32) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if let Ok(chunk) = <&[i32; 8]>::try_from(chunk) {
        use std::arch::x86_64::*;
        // SAFETY: SSE2 is part of x86-64, and the two loads read the array's two halves.
        return unsafe {
            let below = |half: *const i32| {
                let less = _mm_cmplt_epi32(_mm_loadu_si128(half.cast()), _mm_set1_epi32(threshold));
                _mm_movemask_ps(_mm_castsi128_ps(less)) as u32
            };
            !(below(chunk.as_ptr()) | below(chunk.as_ptr().add(4)) << 4) & 0xff
        };
    }
    chunk.iter().enumerate().map(|(i, &k)| u32::from(k >= threshold) << i).sum()
}

/// Keys and ids that reach the threshold, to the front of `near_keys` and `near_ids` (both longer than `keys` by `PAD`); how many.
#[inline(always)]
fn gather(keys: &[i32], threshold: i32, near_keys: &mut [i32], near_ids: &mut [u16]) -> usize {
    let mut near = 0;
    let mut first = 0;
    for chunk in keys.chunks(8) {
        // A bit a key; then only the set bits cost.
        let mut bits = reached(chunk, threshold);
        while bits != 0 {
            let i = bits.trailing_zeros() as usize;
            near_keys[near] = chunk[i];
            near_ids[near] = (first + i) as u16;
            near += 1;
            bits &= bits - 1;
        }
        first += 8;
    }
    near
}

/// The natural logarithm to within 4e-7 relative (1e-7 absolute near 1), which is far below the step of f16, and in a form that
/// compiles to vectors. For 0 and below, and for NaN, what `f32::ln` gives.
#[inline(always)]
pub fn ln(z: f32) -> f32 {
    // z = m * 2^e with m in [sqrt(1/2), sqrt(2)); ln m by the series of atanh in s = (m - 1) / (m + 1).
    let tiny = z < f32::MIN_POSITIVE;
    let scaled = if tiny { z * 8_388_608.0 } else { z };
    let bits = scaled.to_bits() as i32;
    let e = (bits - 0x3f35_04f3) >> 23;
    let m = f32::from_bits((bits - (e << 23)) as u32);
    let s = (m - 1.0) / (m + 1.0);
    let q = s * s;
    let series = 2.0 * s * (1.0 + q * (0.333_333_34 + q * (0.2 + q * (0.142_857_15 + q * 0.111_111_11))));
    let e = e as f32 - if tiny { 23.0 } else { 0.0 };
    let ln = e * 0.693_145_75 + (e * 1.428_606_8e-6 + series);
    if z > 0.0 {
        if z == f32::INFINITY { z } else { ln }
    } else if z == 0.0 {
        f32::NEG_INFINITY
    } else {
        f32::NAN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_are_ordered_and_come_back() {
        let rising = [f32::NEG_INFINITY, -2.5, -1e-40, 0.0, 1e-40, 0.5, 3.0, f32::INFINITY];
        assert!(rising.windows(2).all(|w| key(w[0]) < key(w[1])));
        assert!(rising.iter().all(|&z| score(key(z)) == z && key(z) > NAN));
        assert_eq!((key(-0.0), key(f32::NAN)), (key(0.0), NAN));
    }

    #[test]
    fn ln_is_close_enough_for_f16() {
        for i in 0..2_000_000u32 {
            let z = f32::from_bits(1 + i.wrapping_mul(1065));
            if z.is_finite() && z > 0.0 {
                let (found, wanted) = (f64::from(ln(z)), f64::from(z).ln());
                assert!((found - wanted).abs() <= 4e-7 * wanted.abs().max(0.3), "ln {z} = {found}, is {wanted}");
            }
        }
        assert_eq!((ln(0.0), ln(1.0), ln(f32::INFINITY)), (f32::NEG_INFINITY, 0.0, f32::INFINITY));
        assert!(ln(-1.0).is_nan() && ln(f32::NAN).is_nan());
    }

    proptest! {
        #[test]
        fn is_a_stable_sort(rows in prop::collection::vec(prop::collection::vec(prop_oneof![(-3i8..3).prop_map(f32::from), -90f32..90.0, Just(f32::NAN), Just(f32::NEG_INFINITY)], 1..600), 1..4), share in 0.0f64..1.0) {
            // One Top for all rows: its hint must not matter.
            let mut top = Top::default();
            for row in rows {
                let m = ((row.len() as f64 * share) as usize).max(1);
                let mut wanted: Vec<u16> = (0..row.len() as u16).collect();
                wanted.sort_by_key(|&e| (std::cmp::Reverse(key(row[e as usize])), e));
                let mut ids = vec![u16::MAX; m];
                let (low, high) = top.select(&row, &mut ids);
                prop_assert_eq!(&ids[..], &wanted[..m]);
                prop_assert_eq!((low, high), (key(row[*wanted.last().unwrap() as usize]), key(row[wanted[0] as usize])));
            }
        }
    }
}
