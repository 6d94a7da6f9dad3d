//! The candidates of one token in one layer: the top m experts by selection score, as a trace records them.
//!
//! In: a row of f32 scores, one an expert, and the router's own k ids where the engine has them. Out: m ids by falling
//! score (ties to the lowest id; the router's own ids come first, in the router's order, since they are what runs),
//! and their scores as f16. An engine whose softmax has overwritten the logits hands over probabilities: the logarithm
//! differs from the logit by a constant per token, so order and differences are the logits'.

use half::f16;

/// What the numbers of a score row are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScoreSpace {
    /// Logits: recorded as they are.
    Logits,
    /// Softmax probabilities: recorded as their natural logarithm.
    Softmax,
    /// Any other number that ranks experts, proportional to weight (sigmoid probabilities, with or without a selection
    /// bias): recorded as they are.
    Linear,
}

/// What `select` saw of the whole row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    /// No NaN in the row. A row with one is recorded with every score at the lowest f16, which reranking leaves alone.
    pub usable: bool,
    /// Largest minus smallest score over all experts, in the recorded space; None where that is not a finite number.
    pub range: Option<f64>,
}

/// Working memory of `select`, reused from call to call.
#[derive(Default)]
pub struct Scratch {
    keys: Vec<i32>,
    picked: Vec<u64>,
    routed: Vec<bool>,
}

/// The lowest score a trace can hold; what lies outside f16 saturates.
pub const LOWEST: f16 = f16::MIN;

/// Ranks one row. `ids` and `scores` have the same length m, at most `row.len()`; `routed` holds distinct ids below
/// `row.len()`, or is empty. More than m routed ids: the first m are taken.
pub fn select(
    row: &[f32],
    space: ScoreSpace,
    routed: &[u16],
    scratch: &mut Scratch,
    ids: &mut [u16],
    scores: &mut [f16],
) -> Row {
    debug_assert!(ids.len() == scores.len() && ids.len() <= row.len());
    let m = ids.len();
    let (mut low, mut high, mut nan) = (f32::INFINITY, f32::NEG_INFINITY, false);
    scratch.keys.clear();
    scratch.keys.extend(row.iter().map(|&z| key(z)));
    for &z in row {
        low = low.min(z);
        high = high.max(z);
        nan |= z.is_nan();
    }

    let own = routed.len().min(m);
    ids[..own].copy_from_slice(&routed[..own]);
    if own < m {
        // m of all experts, of which the router's own are passed over: at least m - own others are among them.
        top(&scratch.keys, m, &mut scratch.picked);
        scratch.routed.resize(row.len(), false);
        routed.iter().for_each(|&e| scratch.routed[e as usize] = true);
        let others = scratch.picked.iter().map(|&p| id_of(p)).filter(|&e| !scratch.routed[e as usize]);
        let mut filled = own;
        for (slot, e) in ids[own..].iter_mut().zip(others) {
            *slot = e;
            filled += 1;
        }
        debug_assert_eq!(filled, m);
        routed.iter().for_each(|&e| scratch.routed[e as usize] = false);
    }
    if nan {
        scores.fill(LOWEST);
    } else {
        for (score, &e) in scores.iter_mut().zip(ids.iter()) {
            *score = saturate(in_space(row[e as usize], space));
        }
    }
    let range = in_space(high, space) as f64 - in_space(low, space) as f64;
    Row { usable: !nan, range: (!nan && range.is_finite() && range <= 65504.0).then_some(range) }
}

fn in_space(z: f32, space: ScoreSpace) -> f32 {
    if space == ScoreSpace::Softmax { z.ln() } else { z }
}

/// f16 with what lies outside at its ends: a trace holds no infinity.
pub fn saturate(z: f32) -> f16 {
    f16::from_f32(z.clamp(-65504.0, 65504.0))
}

/// Orders like the score, NaN below everything; -0 and 0 are equal, as they are to the router.
fn key(z: f32) -> i32 {
    let bits = if z.is_nan() { i32::MIN } else { (z + 0.0).to_bits() as i32 };
    if z.is_nan() { bits } else { bits ^ ((bits >> 31) & 0x7fff_ffff) }
}

fn id_of(packed: u64) -> u16 {
    !(packed as u16)
}

/// The m largest keys into `picked`, largest first, ties by lowest id, packed as key and inverted id.
///
/// Bisection on the key with a counting pass (which the compiler turns into vector compares) until a little more than m
/// lie above it; only those are sorted.
fn top(keys: &[i32], m: usize, picked: &mut Vec<u64>) {
    let slack = m + m / 4;
    let (mut low, mut high) = (i32::MIN as i64, i32::MAX as i64);
    // Invariant: at least m keys are >= low.
    while low < high && slack < keys.len() {
        let middle = low + (high - low + 1) / 2;
        let count = keys.iter().map(|&k| (k >= middle as i32) as u32).sum::<u32>() as usize;
        if count >= m {
            low = middle;
            if count <= slack {
                break;
            }
        } else {
            high = middle - 1;
        }
    }
    picked.clear();
    for (e, &k) in keys.iter().enumerate() {
        if k >= low as i32 {
            picked.push(((k ^ i32::MIN) as u32 as u64) << 32 | !(e as u16) as u64);
        }
    }
    picked.sort_unstable_by(|a, b| b.cmp(a));
    picked.truncate(m);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rank(row: &[f32], space: ScoreSpace, routed: &[u16], m: usize) -> (Vec<u16>, Vec<f16>, Row) {
        let (mut ids, mut scores) = (vec![0; m], vec![f16::ZERO; m]);
        let seen = select(row, space, routed, &mut Scratch::default(), &mut ids, &mut scores);
        (ids, scores, seen)
    }

    #[test]
    fn ties_go_to_the_lowest_id_and_the_router_comes_first() {
        let (ids, ..) = rank(&[1.0, 3.0, 3.0, 2.0, -0.0, 0.0], ScoreSpace::Logits, &[], 6);
        assert_eq!(ids, [1, 2, 3, 0, 4, 5]);
        let (ids, ..) = rank(&[1.0, 3.0, 3.0, 2.0, 0.0, 0.0], ScoreSpace::Logits, &[2, 1], 4);
        assert_eq!(ids, [2, 1, 3, 0]);
    }

    #[test]
    fn bad_scores_invent_no_index() {
        for row in [
            [f32::NAN; 5],
            [1.0, f32::NAN, 0.5, 0.25, 0.0],
            [f32::INFINITY, 1.0, 2.0, f32::NEG_INFINITY, 0.0],
            [0.5; 5],
        ] {
            let (mut ids, scores, seen) = rank(&row, ScoreSpace::Logits, &[4, 2], 5);
            assert_eq!(ids[..2], [4, 2]);
            assert!(scores.iter().all(|z| z.is_finite()));
            assert_eq!(seen.usable, !row.iter().any(|z| z.is_nan()));
            assert!(seen.usable || scores.iter().all(|&z| z == LOWEST));
            ids.sort_unstable();
            assert_eq!(ids, [0, 1, 2, 3, 4]);
        }
        assert_eq!(rank(&[f32::INFINITY, 0.0], ScoreSpace::Logits, &[], 2).2.range, None);
        assert_eq!(rank(&[1.0, 0.0], ScoreSpace::Softmax, &[], 2).1, [f16::ZERO, LOWEST]);
    }

    #[test]
    fn softmax_is_recorded_as_its_logarithm() {
        let (_, scores, seen) = rank(&[0.25, 0.75], ScoreSpace::Softmax, &[], 2);
        assert_eq!(scores, [f16::from_f32(0.75f32.ln()), f16::from_f32(0.25f32.ln())]);
        assert!((seen.range.unwrap() - 3f64.ln()).abs() < 1e-6);
    }

    proptest! {
        #[test]
        fn is_a_stable_sort(row in prop::collection::vec(prop_oneof![(-3i8..3).prop_map(f32::from), -90f32..90.0], 1..600), share in 0.0f64..1.0) {
            let m = ((row.len() as f64 * share) as usize).max(1);
            let mut wanted: Vec<u16> = (0..row.len() as u16).collect();
            wanted.sort_by(|&a, &b| row[b as usize].total_cmp(&(row[a as usize])).then(a.cmp(&b)));
            let zero = |z: f32| if z == 0.0 { 0.0 } else { z };
            wanted.sort_by(|&a, &b| zero(row[b as usize]).total_cmp(&zero(row[a as usize])).then(a.cmp(&b)));
            let (ids, ..) = rank(&row, ScoreSpace::Logits, &[], m);
            prop_assert_eq!(&ids[..], &wanted[..m]);
        }
    }
}
