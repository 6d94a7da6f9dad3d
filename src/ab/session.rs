//! Logs that belong together: cells by name over all runs, and as much of them as the look is about.

use super::blocks::Run;
use super::log::{Log, index_of, tokens};
use super::verdict::Number;
use super::{Design, Options};
use crate::error::{Result, err};
use crate::hook::schedule::Schedule;

#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    pub design: Design,
    pub cells: Vec<String>,
    /// In the order of the logs; their rows' cells are indices in `cells`.
    pub runs: Vec<Run>,
}

impl Session {
    /// `skip`: tokens that are left out at the beginning of a run without a schedule, while its cache fills. `Format` where some logs have a schedule's
    /// cells and others do not, or a run is no longer than what is left out.
    pub fn of(logs: Vec<Log>, skip: usize) -> Result<Self> {
        let scheduled = logs.iter().filter(|log| !log.cells.is_empty()).count();
        if scheduled != 0 && scheduled != logs.len() {
            let without = logs.iter().find(|log| log.cells.is_empty()).map_or("", |log| &log.name);
            let all = logs.len();
            return Err(err!(
                Format,
                "{scheduled} of {all} logs have cells of a schedule, {without} has none: analyse them apart"
            ));
        }
        let mut cells: Vec<String> = Vec::new();
        let mut runs = Vec::new();
        for log in logs {
            let mut rows = log.rows;
            if scheduled == 0 {
                if rows.len() <= skip {
                    let n = rows.len();
                    return Err(err!(
                        Format,
                        "{}: {n} decode passes, and the first {skip} are left out (skip)",
                        log.name
                    ));
                }
                let name = log.facts.get("drop_cold_frac").map_or_else(|| log.name.clone(), |f| format!("F{f}"));
                let cell = index_of(&mut cells, &name);
                rows.drain(..skip);
                rows.iter_mut().for_each(|row| row.cell = Some(cell));
            } else {
                let map: Vec<usize> = log.cells.iter().map(|name| index_of(&mut cells, name)).collect();
                rows.iter_mut().for_each(|row| row.cell = row.cell.map(|c| map[c]));
            }
            runs.push(Run { name: log.name, rows });
        }
        let design = if scheduled == 0 { Design::Runs } else { Design::Blocks };
        Ok(Self { design, cells, runs })
    }
}

/// How many looks a plan has, and how many blocks over all runs of it.
pub(super) fn planned(plan: &Schedule) -> (u32, usize) {
    let fact = |name: &str| plan.ab.get(name).and_then(serde_json::Value::as_u64).unwrap_or(1).clamp(1, 100);
    (fact("looks") as u32, plan.blocks.len() * fact("runs") as usize)
}

/// Blocks that were run to their end, in order: (run, rows up to and with the block). A tenth of a block's rows may be missing: the first pass of
/// a run has no time, and a log may have lost some.
pub(super) fn finished(runs: &[Run], plan: &Schedule) -> Vec<(usize, usize)> {
    let mut all = Vec::new();
    for (number, run) in runs.iter().enumerate() {
        let mut end = 0;
        for stretch in run.stretches() {
            end += stretch.len();
            let wanted = stretch[0].block.and_then(|i| plan.blocks.get(usize::try_from(i).ok()?)).map(|b| b.tokens);
            let found = tokens(stretch);
            if stretch[0].cell.is_some() && wanted.is_some_and(|n| 10 * found >= 9 * n) {
                all.push((number, end));
            }
        }
    }
    all
}

/// Which look this is, what it may look at (nothing behind it), and whether even the first one lies ahead.
pub(super) fn at_look(session: &Session, options: &Options) -> (Number, Vec<Run>, bool) {
    let whole = || session.runs.clone();
    if let Some(look) = options.look {
        return (look, whole(), false);
    }
    let Some(plan) = options.plan.as_ref().filter(|_| session.design == Design::Blocks) else {
        return ((1, 1), whole(), false);
    };
    let (looks, blocks) = planned(plan);
    let done = finished(&session.runs, plan);
    let number = (done.len() * looks as usize / blocks.max(1)).min(looks as usize);
    if looks == 1 || number == 0 {
        return ((1, looks), whole(), looks > 1);
    }
    let (last, rows) = done[number * blocks / looks as usize - 1];
    let mut runs = session.runs[..=last].to_vec();
    runs[last].rows.truncate(rows);
    ((number as u32, looks), runs, false)
}
