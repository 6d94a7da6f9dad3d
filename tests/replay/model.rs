//! The reference's replay of one layer, rule for rule, slow and obvious: what `src/cache`, `src/route` and `src/replay` are
//! compared with. The two rows that live reranking leaves alone are left alone here, too.

use std::collections::{BTreeMap, BTreeSet};

use hotset::cache::Policy;
use hotset::replay::Settings;

/// Candidates of one token: (expert, score) by rank.
pub type Row = Vec<(u16, f64)>;

fn choose(row: &Row, resident: &BTreeSet<u16>, s: &Settings) -> Vec<u16> {
    let own = || row.iter().take(s.k).map(|c| c.0).collect();
    if s.moce.lambda <= 0.0 || row.len() <= s.k {
        return own();
    }
    let (first, kth) = (row[0].1, row[s.k - 1].1);
    if row.iter().all(|c| c.1 == first) || first.abs() >= 65504.0 || kth.abs() >= 65504.0 {
        return own();
    }
    let bonus = s.moce.lambda * (first - kth).max(1e-4);
    let mut raised: Vec<(f64, i64, u16)> = Vec::new();
    for (rank, &(e, z)) in row.iter().enumerate() {
        let z = if rank < s.moce.top_j as usize || resident.contains(&e) { z + bonus } else { z };
        raised.push((z, -(rank as i64), e));
    }
    raised.sort_by(|a, b| b.partial_cmp(a).unwrap());
    raised[..s.k].iter().map(|r| r.2).collect()
}

/// Misses after the warm-up.
pub fn misses(rows: &[Row], n_experts: usize, s: &Settings) -> u64 {
    if s.capacity >= n_experts {
        return 0;
    }
    let mut resident: BTreeSet<u16> = BTreeSet::new();
    let mut last_used = vec![0usize; n_experts];
    let mut uses = vec![0u64; n_experts];
    let mut popularity = vec![0f64; n_experts];
    let (mut unit, growth) = (1.0, 1.0 / s.decay);
    let mut misses = 0;
    for (t, row) in rows.iter().enumerate() {
        let chosen = choose(row, &resident, s);
        let counted = t >= s.warmup;
        if counted {
            misses += s.k.saturating_sub(chosen.len()) as u64;
        }
        // The first token after this one whose own first k have the expert.
        let next_use: BTreeMap<u16, usize> = (0..n_experts as u16)
            .map(|e| {
                let uses = |row: &Row| row.iter().take(s.k).any(|c| c.0 == e);
                (e, (t + 1..rows.len()).find(|&t| uses(&rows[t])).unwrap_or(1_000_000_000))
            })
            .filter(|_| s.policy == Policy::BeladyMin)
            .collect();
        for &e in &chosen {
            if !resident.contains(&e) {
                misses += u64::from(counted);
                if resident.len() >= s.capacity {
                    let pool = resident.iter().copied().filter(|c| !chosen.contains(c));
                    let at = |c: &u16| *c as usize;
                    let victim = match s.policy {
                        Policy::Lru => pool.min_by_key(|c| (last_used[at(c)], *c)),
                        Policy::Lfu => pool.min_by_key(|c| (uses[at(c)], last_used[at(c)], *c)),
                        Policy::BeladyMin => pool.max_by_key(|c| (next_use[c], -i64::from(*c))),
                        _ => pool.min_by(|a, b| {
                            let key = |c: &u16| (popularity[at(c)], last_used[at(c)], *c);
                            key(a).partial_cmp(&key(b)).unwrap()
                        }),
                    };
                    resident.remove(&victim.unwrap());
                }
                resident.insert(e);
            }
            // While the token is being placed, as the reference has it.
            last_used[e as usize] = t + 1;
            uses[e as usize] += 1;
        }
        unit *= growth;
        if unit > 1e100 {
            let scale = 1.0 / unit;
            popularity.iter_mut().for_each(|p| *p *= scale);
            unit = 1.0;
        }
        match s.policy {
            Policy::Ema => chosen.iter().for_each(|&e| popularity[e as usize] += unit),
            Policy::NearPickEma => {
                let n = s.near_pick_n.min(row.len());
                let width = (n as f64 - s.k as f64).max(1.0);
                for (rank, &(e, _)) in row.iter().enumerate().take(n) {
                    let credit = if rank < s.k { 1.0 } else { 0.35 * (1.0 - (rank - s.k) as f64 / width) };
                    popularity[e as usize] += credit * unit;
                }
            }
            Policy::InverseRouterEma if !row.is_empty() => {
                let low = row[row.len() - 1].1;
                let span = (row[0].1 - low).max(1e-4);
                for (rank, &(e, z)) in row.iter().enumerate() {
                    let mut credit = (z - low) / span;
                    if rank < s.k {
                        credit += 1.0;
                    }
                    popularity[e as usize] += credit * unit;
                }
            }
            _ => {}
        }
    }
    misses
}
