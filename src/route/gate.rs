//! Routing weights for an engine without a graph of its own.

use super::ScoreSpace;

/// Weights of the chosen experts that sum to 1: the softmax of their scores where those are logits, their share where
/// they are probabilities or proportional to weight. All 0 where that is no number. `ids` are from 0 to below `scores.len()`.
pub fn gate(scores: &[f32], ids: &[i32], space: ScoreSpace, weights: &mut [f32]) {
    let score = |id: i32| f64::from(scores[id as usize]);
    let top = ids.iter().map(|&id| score(id)).fold(f64::NEG_INFINITY, f64::max);
    let mass = |id: i32| if space == ScoreSpace::Logits { (score(id) - top).exp() } else { score(id).max(0.0) };
    let sum: f64 = ids.iter().map(|&id| mass(id)).sum();
    let sound = sum > 0.0 && sum.is_finite();
    for (w, &id) in weights.iter_mut().zip(ids) {
        *w = if sound { (mass(id) / sum) as f32 } else { 0.0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_to_one_or_is_nothing() {
        let mut w = [9.0; 2];
        gate(&[1.0, 2.0, 1.0], &[0, 2], ScoreSpace::Logits, &mut w);
        assert_eq!(w, [0.5, 0.5]);
        gate(&[0.6, 0.2, 0.2], &[0, 1], ScoreSpace::Softmax, &mut w);
        assert_eq!(w, [0.75, 0.25]);
        for bad in [[f32::NAN; 2], [f32::INFINITY; 2], [f32::NEG_INFINITY; 2]] {
            gate(&bad, &[0, 1], ScoreSpace::Logits, &mut w);
            assert_eq!(w, [0.0, 0.0]);
        }
    }
}
