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

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;
    use crate::trace::block::{Phase, Placement};
    use crate::trace::sidecar::{Resident, Settings, SettingsFrom, Shape};

    /// 20 tokens: a prefill of 8 in two passes, one of 6 whose first two are not here, 8 of decode. Settings change at
    /// token 12, which is a gap.
    fn made() -> Sidecar {
        let range = |first, n_tokens, phase, position, tokens_per_pass, left_out_before| TokenRange {
            first,
            n_tokens,
            phase,
            position,
            tokens_per_pass,
            placement: vec![Placement::Slots],
            left_out_before,
        };
        let settings = |token, lambda| SettingsFrom { token, settings: Settings { lambda, ..Settings::default() } };
        let resident = |before_token, reason: &str, id| Resident {
            before_token,
            reason: reason.to_owned(),
            layers: vec![vec![id]],
            ..Resident::default()
        };
        Sidecar {
            shape: Shape { blocks: vec![0], n_experts: vec![9], k: 1, top_m: 1 },
            settings: vec![settings(0, 0.0), settings(12, 0.5)],
            ranges: vec![
                range(0, 8, Phase::Prefill, 0, 4, 0),
                range(8, 4, Phase::Prefill, 10, 6, 2),
                range(12, 8, Phase::Decode, 14, 1, 0),
            ],
            resident: vec![resident(0, "start", 1), resident(12, "settings changed", 2)],
            residency: (0..20).map(|token| (token % 3).to_string()).collect(),
            left_out: [("layer saw fewer tokens".to_owned(), 2)].into(),
            expert_bytes: vec![7],
            closed: true,
            ..Sidecar::default()
        }
    }

    fn spans(sidecar: &Sidecar) -> Vec<(u64, u64, i64, u32)> {
        sidecar.ranges.iter().map(|r| (r.first, r.n_tokens, r.position, r.left_out_before)).collect()
    }

    #[test]
    fn a_cut_keeps_what_is_true() {
        assert_eq!(made().cut(0..20, 20), made());
        // through the second pass of the first range, and through the third pass
        let cut = made().cut(5..10, 20);
        assert_eq!(spans(&cut), [(0, 3, 5, 1), (3, 2, 10, 2)]);
        assert_eq!((cut.settings.len(), cut.settings[0].token, cut.resident.len()), (1, 0, 0));
        assert_eq!((cut.residency.concat().as_str(), cut.left_out.len()), ("20120", 0));
        assert_eq!(cut.more["cut"]["whole"]["left_out"]["layer saw fewer tokens"], 2);
        // from within the third pass: what it lacks is the two that were left out, and one
        let cut = made().cut(9..20, 20);
        assert_eq!(spans(&cut), [(0, 3, 11, 3), (3, 8, 14, 0)]);
        assert_eq!(cut.settings.iter().map(|s| (s.token, s.settings.lambda)).collect::<Vec<_>>(), [(0, 0.0), (3, 0.5)]);
        assert_eq!(cut.resident.iter().map(|r| r.before_token).collect::<Vec<_>>(), [3]);
        // from a gap on everything is known
        let cut = made().cut(12..20, 20);
        assert_eq!((cut.settings[0].token, cut.settings[0].settings.lambda), (0, 0.5));
        assert_eq!((cut.settings.len(), cut.resident[0].before_token, cut.described_tokens()), (1, 0, 8));
        // a cut of a cut names both
        let again = cut.cut(2..8, 8);
        assert_eq!((&again.more["cut"]["start"], &again.more["cut"]["before"]["start"]), (&json!(2), &json!(12)));
        for part in [made().cut(5..10, 20), again] {
            assert_eq!(Sidecar::from_json(&part.to_json()).unwrap(), part);
        }
        // tokens that nobody described
        assert_eq!(made().cut(20..30, 40).described_tokens(), 0);
    }

    #[test]
    fn parts_joined_are_the_whole_but_for_the_joint() {
        let parts = |at: u64| {
            let part = |name: &str, tokens: Range<u64>| {
                (name.to_owned(), tokens.end - tokens.start, Some(made().cut(tokens, 20)))
            };
            [part("a", 0..at), part("b", at..20)]
        };
        let all = Sidecar::join(&parts(12)).unwrap().unwrap();
        assert_eq!((&all.ranges, &all.residency, &all.expert_bytes), (&made().ranges, &made().residency, &vec![7]));
        assert_eq!((&all.settings, all.closed), (&made().settings, true));
        assert_eq!(all.resident[1].reason, "joined: settings changed");
        assert_eq!(
            (&all.more["joined"][1]["first"], &all.more["joined"][1]["resident_known"]),
            (&json!(12), &json!(true))
        );
        let all = Sidecar::join(&parts(14)).unwrap().unwrap();
        assert_eq!((all.described_tokens(), all.more["joined"][1]["resident_known"].as_bool()), (20, Some(false)));
        assert_eq!(Sidecar::from_json(&all.to_json()).unwrap(), all);
        assert_eq!(Sidecar::join(&[("a".into(), 3, None)]).unwrap(), None);
    }

    #[test]
    fn parts_that_do_not_fit_are_named() {
        let with = |change: fn(&mut Sidecar)| {
            let mut other = made();
            change(&mut other);
            Sidecar::join(&[("a".into(), 20, Some(made())), ("none".into(), 1, None), ("b".into(), 20, Some(other))])
        };
        for (change, says) in [
            ((|s| s.shape.k = 2) as fn(&mut Sidecar), "a and b: the shape differs"),
            (|s| s.score_space = "logit".into(), "a and b: what the scores are differs: \"\", \"logit\""),
            (|s| s.model.architecture = "x".into(), "a and b: the model differs"),
        ] {
            assert!(with(change).unwrap_err().detail.contains(says));
        }
        // a part without a sidecar is a hole, and other bytes are no bytes
        let all = with(|s| s.expert_bytes = vec![8]).unwrap().unwrap();
        assert_eq!((all.described_tokens(), all.residency.len(), all.expert_bytes.len()), (20, 0, 0));
        assert_eq!((all.closed, all.left_out["layer saw fewer tokens"], all.more.len()), (false, 4, 1));
        assert_eq!(all.ranges[3].first, 21);
        assert_eq!(all.more["joined"][0]["more"], Value::Object(Map::new()));
    }
}
