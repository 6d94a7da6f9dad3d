//! The candidates of one token in one layer: the top m experts by selection score, as a trace records them.
//!
//! In: a row of f32 scores, one an expert, and the router's own k ids where the engine has them. Out: m ids by falling
//! score (ties to the lowest id; the router's own ids come first, in the router's order, since they are what runs),
//! and their scores as f16. An engine whose softmax has overwritten the logits hands over probabilities: the logarithm
//! differs from the logit by a constant per token, so order and differences are the logits'.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::top::{self, Top};

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
    top: Top,
    picked: Vec<u16>,
    routed: Vec<bool>,
    scores: Vec<f32>,
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
    scratch.picked.resize(m, 0);
    let (low, high) = scratch.top.select(row, &mut scratch.picked);
    let nan = low == top::NAN;

    let own = routed.len().min(m);
    ids[..own].copy_from_slice(&routed[..own]);
    if own == 0 || scratch.picked[..own] == ids[..own] {
        ids.copy_from_slice(&scratch.picked);
    } else {
        // The router's order is another (ties, a choice by groups): its own come first. At least m - own others were picked.
        scratch.routed.resize(row.len(), false);
        routed.iter().for_each(|&e| scratch.routed[e as usize] = true);
        let others = scratch.picked.iter().filter(|&&e| !scratch.routed[e as usize]);
        ids[own..].iter_mut().zip(others).for_each(|(id, &e)| *id = e);
        routed.iter().for_each(|&e| scratch.routed[e as usize] = false);
    }
    if nan {
        scores.fill(LOWEST);
    } else {
        scratch.scores.resize(m, 0.0);
        for (z, &e) in scratch.scores.iter_mut().zip(ids.iter()) {
            *z = row[e as usize];
        }
        if space == ScoreSpace::Softmax {
            scratch.scores.iter_mut().for_each(|z| *z = top::ln(*z));
        }
        scratch.scores.iter_mut().for_each(|z| *z = z.clamp(-65504.0, 65504.0));
        scores.convert_from_f32_slice(&scratch.scores);
    }
    let in_space = |key: i32| match space {
        ScoreSpace::Softmax => f64::from(top::ln(top::score(key))),
        ScoreSpace::Logits | ScoreSpace::Linear => f64::from(top::score(key)),
    };
    let range = in_space(high) - in_space(low);
    Row { usable: !nan, range: (!nan && range.is_finite() && range <= 65504.0).then_some(range) }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn what_lies_outside_f16_saturates() {
        let (_, scores, _) = rank(&[1e9, 7.0, -1e9], ScoreSpace::Logits, &[], 3);
        assert_eq!(scores, [f16::MAX, f16::from_f32(7.0), f16::MIN]);
    }

    #[test]
    fn softmax_is_recorded_as_its_logarithm() {
        let (_, scores, seen) = rank(&[0.25, 0.75], ScoreSpace::Softmax, &[], 2);
        assert_eq!(scores, [f16::from_f32(0.75f32.ln()), f16::from_f32(0.25f32.ln())]);
        assert!((seen.range.unwrap() - 3f64.ln()).abs() < 1e-6);
    }
}
