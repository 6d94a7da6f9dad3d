//! Two distributions of the next token, and what became of them over a text.

use crate::text::surprise;

/// Of each token of the text, a cell against the reference.
#[derive(Default)]
pub struct Differences {
    /// -ln of the token's probability: the cell's less the reference's.
    pub surprise: Vec<f64>,
    /// Sum of the cell's own.
    nll: f64,
    /// KL(reference || cell) in nats.
    kl: Vec<f64>,
    agreed: usize,
}

impl Differences {
    pub fn add(&mut self, reference: &[f32], cell: &[f32], target: usize) {
        let own = surprise(cell, target);
        self.nll += own;
        self.surprise.push(own - surprise(reference, target));
        self.kl.push(divergence(reference, cell));
        self.agreed += usize::from(likeliest(reference) == likeliest(cell));
    }

    pub fn perplexity(&self) -> f64 {
        (self.nll / self.surprise.len() as f64).exp()
    }

    pub fn kl_mean(&self) -> f64 {
        self.kl.iter().sum::<f64>() / self.kl.len() as f64
    }

    pub fn kl_quantile(&self, q: f64) -> f64 {
        let mut ascending = self.kl.clone();
        ascending.sort_by(f64::total_cmp);
        hotset::ab::bootstrap::quantile(&ascending, q)
    }

    pub fn top1_agreement(&self) -> f64 {
        self.agreed as f64 / self.kl.len() as f64
    }
}

/// Sum of p ln(p / q) over the words, in f64; exactly 0 where the logits are equal. Rounding never makes it negative.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let (p_all, q_all) = (log_sum(p), log_sum(q));
    let each = p.iter().zip(q).filter(|(p, _)| **p > f32::NEG_INFINITY).map(|(&p, &q)| {
        let (p, q) = (f64::from(p) - p_all, f64::from(q) - q_all);
        p.exp() * (p - q)
    });
    each.sum::<f64>().max(0.0)
}

fn log_sum(logits: &[f32]) -> f64 {
    let top = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    top + logits.iter().map(|&x| (f64::from(x) - top).exp()).sum::<f64>().ln()
}

/// The first of the largest.
fn likeliest(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(p: &[f64]) -> Vec<f32> {
        // any constant may be added
        p.iter().map(|p| p.ln() as f32 + 7.0).collect()
    }

    #[test]
    fn divergence_of_known_distributions() {
        let (p, q) = ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5]);
        let wanted = 0.5 * 2f64.ln() + 0.25 * 0.5f64.ln();
        assert!((divergence(&logits(&p), &logits(&q)) - wanted).abs() < 1e-6);
        assert_eq!(divergence(&logits(&p), &logits(&p)), 0.0);
        // what the reference rules out costs nothing; what only the cell rules out, everything
        let out = [0.0, f32::NEG_INFINITY];
        assert_eq!(divergence(&out, &[0.0, f32::NEG_INFINITY]), 0.0);
        assert!((divergence(&out, &[0.0, 0.0]) - 2f64.ln()).abs() < 1e-12);
        assert_eq!(divergence(&[0.0, 0.0], &out), f64::INFINITY);
    }

    #[test]
    fn differences_add_up() {
        let mut d = Differences::default();
        let (p, q) = (logits(&[0.5, 0.25, 0.25]), logits(&[0.25, 0.25, 0.5]));
        d.add(&p, &q, 0);
        d.add(&p, &p, 1);
        assert!((d.perplexity() - 4.0).abs() < 1e-5);
        assert!((d.surprise[0] - 2f64.ln()).abs() < 1e-6 && d.surprise[1] == 0.0);
        assert_eq!(d.top1_agreement(), 0.5);
        assert!(
            (d.kl_mean() - d.kl[0] / 2.0).abs() < 1e-12 && d.kl_quantile(1.0) == d.kl[0] && d.kl_quantile(0.0) == 0.0
        );
    }
}
