//! Replays a recorded run by `src/route` and `src/cache`, with the settings and the residency that its sidecar tells of: the same
//! steps as the live hook takes, from the recorded candidates.

use half::f16;
use hotset::cache::{LayerCache, Placed};
use hotset::route::{Delta, Moce};
use hotset::trace::{Placement, Sidecar, Trace};

/// Misses of each layer, of the recorded tokens.
pub fn misses_per_layer(trace: &Trace, sidecar: &Sidecar) -> Vec<u64> {
    let (n_layers, m, k) = (trace.n_layers(), trace.top_m(), sidecar.shape.k as usize);
    let one = |layer: usize| {
        let mut misses = 0;
        let n_experts = sidecar.shape.n_experts[layer] as usize;
        let mut cache = LayerCache::lru(n_experts, 1);
        let (mut resident, mut settings) = (sidecar.resident.iter().peekable(), sidecar.settings.iter().peekable());
        let mut moce = Moce::default();
        let (mut ids, mut scores) = (vec![0; m], vec![f16::ZERO; m]);
        for range in &sidecar.ranges {
            let placement = range.placement[if range.placement.len() == 1 { 0 } else { layer }];
            let mut token = range.first;
            while token < range.end() {
                if let Some(s) = settings.next_if(|s| s.token <= token) {
                    let s = &s.settings;
                    assert_eq!((s.policy.as_str(), s.delta.as_str()), ("lru", "token_topk"));
                    moce = Moce { lambda: s.lambda, top_j: s.top_j, delta: Delta::TokenTopk };
                    cache = LayerCache::lru(n_experts, s.slots[layer]);
                }
                if let Some(r) = resident.next_if(|r| r.before_token <= token) {
                    cache.restore(&r.layers[layer]);
                }
                // All of a pass is chosen before any of it is placed, as live.
                let rows = u64::from(range.tokens_per_pass).min(range.end() - token);
                let mut chosen = Vec::new();
                for row in token..token + rows {
                    let record = trace.record(row as usize, layer);
                    record.copy_ids(&mut ids);
                    record.copy_scores(&mut scores);
                    let mut ranks: Vec<u16> = (0..k as u16).collect();
                    if let Some(bonus) = moce.bonus(&scores, k, None) {
                        moce.rerank(&ids, &scores, bonus, |e| cache.is_resident(e), &mut vec![0.0; k], &mut ranks);
                    }
                    chosen.push(ranks.iter().map(|&rank| ids[rank as usize]).collect::<Vec<u16>>());
                }
                let fits = cache.begin_batch(chosen.iter().flatten().copied());
                assert_eq!(fits, placement != Placement::PassThrough, "layer {layer} token {token}");
                if fits {
                    for experts in &chosen {
                        let miss = |&e: &u16| matches!(cache.place(e).unwrap(), Placed::Miss { .. });
                        misses += experts.iter().map(miss).filter(|m| *m).count() as u64;
                        cache.end_token();
                    }
                    cache.end_batch();
                }
                token += rows;
            }
        }
        misses
    };
    (0..n_layers).map(one).collect()
}
