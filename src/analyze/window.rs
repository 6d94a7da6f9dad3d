//! The working set: how many experts of a layer a stretch of tokens uses.

use crate::trace::{Phase, Routing};

/// Mean number of distinct experts in `window` consecutive decode tokens of one turn, over all such stretches of a layer; None where no turn is that long.
pub fn working_set(routing: &Routing, layer: usize, window: usize) -> Option<f64> {
    let mut count = vec![0u32; routing.n_experts];
    let mut inside: std::collections::VecDeque<&[u16]> = std::collections::VecDeque::new();
    let (mut distinct, mut sum, mut stretches, mut turn) = (0u64, 0u64, 0u64, None);
    for (pass, row) in routing.rows(layer) {
        let decode = pass.phase == Phase::Decode;
        if !decode || turn != Some(pass.turn) {
            inside.clear();
            count.fill(0);
            distinct = 0;
            turn = decode.then_some(pass.turn);
        }
        if !decode || window == 0 {
            continue;
        }
        if inside.len() == window {
            for &id in inside.pop_front().unwrap_or_default() {
                let n = &mut count[usize::from(id)];
                *n -= 1;
                distinct -= u64::from(*n == 0);
            }
        }
        for &id in row {
            let n = &mut count[usize::from(id)];
            distinct += u64::from(*n == 0);
            *n += 1;
        }
        inside.push_back(row);
        if inside.len() == window {
            sum += distinct;
            stretches += 1;
        }
    }
    (stretches > 0).then(|| sum as f64 / stretches as f64)
}
