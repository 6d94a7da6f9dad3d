//! The first call of a layer: rank the candidates, record them, and rerank in favour of what is resident.

use half::slice::HalfFloatSliceExt;

use super::pass::Stage;
use super::{Batch, Hook, Rows, RowsMut};
use crate::error::Result;
use crate::route::{Delta, ScoreSpace, candidates, moce};
use crate::trace::Phase;

impl Hook {
    /// `scores`: rows of `n_experts`; `ids`: rows of k, in (if `batch.routed`) the router's own choice, out what runs.
    pub fn select(&mut self, batch: &Batch, scores: &impl Rows<f32>, ids: &mut impl RowsMut<i32>) -> Result<()> {
        let layer = self.check_batch(batch)?;
        if batch.routed {
            self.check_ids(batch, ids)?;
        }
        self.enter(layer, Stage::Select, batch);
        let prefill = self.pass.as_ref().is_some_and(|p| p.phase == Phase::Prefill);
        let recording = self.record_layer(layer, batch);
        let rerank = self.live.moce.lambda > 0.0 && (!prefill || self.config.prefill.moce);
        let wanted = self.config.policy.needs_candidates();
        (self.layers[layer].swapped, self.layers[layer].mass_swapped) = (0, 0.0);
        if !recording && !rerank && !wanted && batch.routed {
            return Ok(());
        }
        if rerank {
            self.forget_failed(layer);
        }
        let k = batch.k as usize;
        // Without recording, reranking or a policy that wants them only the top k are asked for.
        let m = if recording || rerank || wanted { self.top_m } else { k };
        let (l, s) = (&mut self.layers[layer], &mut self.scratch);
        s.ranked.ids.clear();
        s.ranked.scores.clear();
        s.ranked.layer = wanted.then_some(layer);
        for token in 0..batch.n_tokens {
            let routed: &[u16] = if batch.routed { &s.batch[token * k..][..k] } else { &[] };
            let (row_ids, row_scores) = (&mut s.ids[..m], &mut s.scores[..m]);
            let row = scores.row(token);
            let seen = candidates::select(row, batch.space, routed, &mut s.ranking, row_ids, row_scores);
            // As recorded, so that a replay decides on the same number.
            let range = seen.range.map(|r| r as f32);
            if recording {
                if let Some(r) = &mut self.recorder {
                    r.push_row(layer, token, row_ids, row_scores, range.unwrap_or(f32::NAN));
                }
            }
            let wide = &mut s.wide[..m];
            if wanted || rerank {
                row_scores.convert_to_f32_slice(wide);
            }
            if wanted {
                s.ranked.ids.extend_from_slice(row_ids);
                s.ranked.scores.extend_from_slice(wide);
            }
            let mut bonus = None;
            if rerank {
                let range = match self.live.moce.delta {
                    Delta::TokenTopk => None,
                    Delta::TokenFull => range.map(f64::from),
                    Delta::RunningFull => {
                        l.range.push(range.map(f64::from));
                        l.range.mean()
                    }
                };
                bonus = self.live.moce.bonus(wide, k, range);
                self.stats.bad_rows += u64::from(bonus.is_none() && m > k);
            }
            let out = ids.row_mut(token);
            let Some(bonus) = bonus else {
                out.iter_mut().zip(&*row_ids).for_each(|(id, &e)| *id = e.into());
                continue;
            };
            let (raised, chosen) = (&mut s.raised[..k], &mut s.chosen[..k]);
            let cache = &l.cache;
            let swapped = self.live.moce.rerank(row_ids, wide, bonus, |e| cache.is_resident(e), raised, chosen);
            if swapped > 0 {
                l.swapped += swapped;
                l.mass_swapped += moce::mass_lost(row_scores, chosen, batch.space != ScoreSpace::Linear);
            }
            out.iter_mut().zip(&*chosen).for_each(|(id, &rank)| *id = row_ids[rank as usize].into());
        }
        Ok(())
    }

    /// Tells the recorder of this layer; whether its rows are to be recorded.
    fn record_layer(&mut self, layer: usize, batch: &Batch) -> bool {
        let Some(r) = self.recorder.as_mut().filter(|r| r.in_pass()) else { return false };
        let recording = r.begin_layer(layer, batch.n_tokens, batch.tail);
        if recording && self.score_space != Some(batch.space) {
            self.score_space = Some(batch.space);
            r.set_score_space(super::pass::space_name(batch.space));
        }
        recording
    }
}
