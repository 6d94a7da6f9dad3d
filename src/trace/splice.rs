//! Sidecars of traces that are cut and joined: they say what is still true of the tokens at hand, and no more.
//!
//! What is known token by token (settings, ranges, what was resident, residency) moves with the tokens. Counts of what was left out
//! are known for a whole trace only: a part keeps them, as those of the whole, under `more.cut`. What was resident at the
//! first token of a part is known only if it was noted just there; else the part has no such entry, and a replay of it
//! starts from an empty cache. The same at a joint.

use std::ops::Range;

use serde_json::{Value, json};

use crate::error::{Result, err};
use crate::trace::sidecar::{Sidecar, TokenRange};

impl Sidecar {
    /// The sidecar of `tokens` of a trace that has `n_tokens`. Tokens that this sidecar does not describe stay undescribed.
    pub fn cut(&self, tokens: Range<u64>, n_tokens: u64) -> Self {
        if tokens == (0..n_tokens) {
            return self.clone();
        }
        let (start, end) = (tokens.start, tokens.end);
        let mut settings: Vec<_> = self.settings.iter().filter(|from| from.token < end.max(1)).cloned().collect();
        // only the last of those that began before holds
        let before = settings.iter().filter(|from| from.token <= start).count();
        settings.drain(..before.saturating_sub(1));
        settings.iter_mut().for_each(|from| from.token = from.token.saturating_sub(start));
        let resident = self.resident.iter().filter(|r| (start..end.max(start + 1)).contains(&r.before_token)).cloned();
        let resident = resident.map(|mut r| {
            r.before_token -= start;
            r
        });
        let index = |token: u64| usize::try_from(token).unwrap_or(usize::MAX).min(self.residency.len());
        let cut = json!({
            "start": start,
            "end": end,
            "of_tokens": n_tokens,
            "whole": { "left_out": self.left_out, "closed": self.closed, "error": self.error },
            "before": self.more.get("cut"),
        });
        let mut more = self.more.clone();
        more.insert("cut".into(), cut);
        Self {
            settings,
            ranges: self.ranges.iter().filter_map(|range| cut_range(range, start, end)).collect(),
            resident: resident.collect(),
            residency: self.residency[index(start)..index(end)].to_vec(),
            left_out: Default::default(),
            closed: true,
            error: None,
            more,
            ..self.clone()
        }
    }

    /// The sidecar of traces put one after the other. Of each its name, its tokens, and its sidecar if it has one; `None`
    /// if none has. They must agree about what tokens cannot say one by one: model, shape, scores.
    pub fn join(parts: &[(String, u64, Option<Self>)]) -> Result<Option<Self>> {
        let Some((first_name, first)) = parts.iter().find_map(|(name, _, s)| s.as_ref().map(|s| (name, s))) else {
            return Ok(None);
        };
        let mut all = Self {
            settings: Vec::new(),
            ranges: Vec::new(),
            resident: Vec::new(),
            residency: Vec::new(),
            left_out: Default::default(),
            closed: true,
            error: None,
            more: Default::default(),
            ..first.clone()
        };
        let mut joined = Vec::new();
        let mut at = 0;
        for (name, n_tokens, sidecar) in parts {
            joined.push(json!({
                "name": name,
                "first": at,
                "tokens": n_tokens,
                "resident_known": sidecar.as_ref().is_some_and(|s| s.resident.iter().any(|r| r.before_token == 0)),
                "more": sidecar.as_ref().map_or(Value::Null, |s| Value::Object(s.more.clone())),
            }));
            match sidecar {
                Some(sidecar) => {
                    first.check_joint(sidecar).map_err(|e| err!(Argument, "{first_name} and {name}: {e}"))?;
                    all.append(sidecar, at, *n_tokens);
                }
                None => (all.row_range, all.expert_bytes, all.closed) = (false, Vec::new(), false),
            }
            at = at.checked_add(*n_tokens).ok_or_else(|| err!(Argument, "{name}: too many tokens"))?;
        }
        if all.residency.len() as u64 != at {
            all.residency.clear();
        }
        all.more.insert("joined".into(), joined.into());
        Ok(Some(all))
    }

    fn check_joint(&self, other: &Self) -> Result<()> {
        let differ = |what: &str, a: &dyn std::fmt::Debug, b: &dyn std::fmt::Debug| {
            Err(err!(Argument, "{what} differs: {a:?}, {b:?}"))
        };
        if self.shape != other.shape {
            return differ("the shape", &self.shape, &other.shape);
        }
        if self.score_space != other.score_space {
            return differ("what the scores are", &self.score_space, &other.score_space);
        }
        if self.model != other.model {
            return differ("the model", &self.model, &other.model);
        }
        Ok(())
    }

    /// What is known of `n_tokens` that follow at token `at`.
    fn append(&mut self, part: &Self, at: u64, n_tokens: u64) {
        self.settings.extend(part.settings.iter().filter(|s| s.token <= n_tokens).cloned().map(|mut from| {
            from.token += at;
            from
        }));
        self.resident.extend(part.resident.iter().filter(|r| r.before_token < n_tokens.max(1)).cloned().map(
            |mut r| {
                r.before_token += at;
                if r.before_token == at && at > 0 {
                    r.reason = format!("joined: {}", r.reason);
                }
                r
            },
        ));
        self.ranges.extend(part.ranges.iter().filter_map(|range| cut_range(range, 0, n_tokens)).map(|mut range| {
            range.first += at;
            range
        }));
        if self.residency.len() as u64 == at && part.residency.len() as u64 == n_tokens {
            self.residency.extend_from_slice(&part.residency);
        }
        for (reason, n) in &part.left_out {
            let sum = self.left_out.entry(reason.clone()).or_default();
            *sum = sum.saturating_add(*n);
        }
        if self.expert_bytes != part.expert_bytes {
            self.expert_bytes.clear();
        }
        self.row_range &= part.row_range;
        self.closed &= part.closed;
        self.error = self.error.take().or_else(|| part.error.clone());
    }
}

/// What is left of a range between two tokens, counted from the first; `None` if nothing is.
fn cut_range(range: &TokenRange, start: u64, end: u64) -> Option<TokenRange> {
    let (first, last) = (range.first.max(start), range.end().min(end));
    if first >= last {
        return None;
    }
    let skipped = first - range.first;
    let mut cut = TokenRange { first: first - start, n_tokens: last - first, ..range.clone() };
    if skipped > 0 {
        if range.position >= 0 {
            cut.position = range.position.saturating_add_unsigned(skipped);
        }
        // of the pass that the cut goes through, the tokens before it are not there
        let before = u64::from(range.left_out_before) + skipped;
        cut.left_out_before = (before % u64::from(range.tokens_per_pass.max(1))) as u32;
    }
    Some(cut)
}
