//! What misses cost: bytes from the SSD, and tokens a second where reads and computation do not overlap. The model, and its numbers, are the reference
//! replayer's: seconds a token = bytes / bandwidth + computation. Where they overlap perfectly, which no run does, it is the longer of the two.

/// Units are in the names; 1 MB = 10^6 bytes, 1 GB/s = 10^9 bytes a second.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// One expert of one layer on disk.
    pub expert_bytes: f64,
    /// A token's time with everything resident.
    pub compute_ms: f64,
    /// Of the SSD, one estimate each.
    pub bandwidths_gb_s: Vec<f64>,
}

impl Default for Estimate {
    /// The target's: 1,382,400 bytes an expert (Q2_0), 12 ms, 3.9 GB/s with one reading thread and 6.8 GB/s with four.
    fn default() -> Self {
        Self { expert_bytes: 1_382_400.0, compute_ms: 12.0, bandwidths_gb_s: vec![3.9, 6.8] }
    }
}

impl Estimate {
    /// MB that a token reads.
    pub fn mb_per_token(&self, misses_per_token: f64) -> f64 {
        misses_per_token * (self.expert_bytes / 1e6)
    }

    /// Tokens a second at one bandwidth.
    pub fn tokens_per_second(&self, mb_per_token: f64, bandwidth_gb_s: f64) -> f64 {
        1.0 / (mb_per_token / (bandwidth_gb_s * 1000.0) + self.compute_ms / 1000.0)
    }

    /// Tokens a second if every read were hidden behind computation, as far as there is enough of it.
    pub fn tokens_per_second_overlapped(&self, mb_per_token: f64, bandwidth_gb_s: f64) -> f64 {
        1.0 / (mb_per_token / (bandwidth_gb_s * 1000.0)).max(self.compute_ms / 1000.0)
    }
}

/// A number to so many decimals, as Python's `round` does: the exact value of the double, halves to even.
pub fn round(value: f64, decimals: usize) -> f64 {
    format!("{value:.decimals$}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_as_python() {
        let two =
            [(0.125, 0.12), (0.375, 0.38), (2.675, 2.67), (84.605, 84.61), (0.0, 0.0), (1e9, 1e9), (63.209, 63.21)];
        two.iter().for_each(|&(x, y)| assert_eq!(round(x, 2), y, "{x}"));
        assert_eq!(round(0.03125, 4), 0.0312);
    }

    #[test]
    fn the_published_figures() {
        let e = Estimate::default();
        assert_eq!(round(e.mb_per_token(84.61), 2), 116.96);
        let mb = e.mb_per_token(84.61);
        assert_eq!([round(e.tokens_per_second(mb, 3.9), 2), round(e.tokens_per_second(mb, 6.8), 2)], [23.81, 34.25]);
        let overlapped = [3.9, 6.8].map(|b| round(e.tokens_per_second_overlapped(mb, b), 1));
        assert_eq!(overlapped, [33.3, 58.1]);
        assert_eq!(round(e.tokens_per_second_overlapped(0.0, 1.0), 2), 83.33);
    }
}
