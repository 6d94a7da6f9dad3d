//! `hotset analyze`: what the routing of a run looks like.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result};
use hotset::trace::{Routing, Sidecar, Trace, import};

/// The routing of a Q4RT trace, or of a route_trace v1 CSV.
pub fn routing_of(path: &Path, k: Option<usize>) -> Result<Routing> {
    let name = || path.display().to_string();
    if path.extension().is_some_and(|e| e == "csv") {
        let mut input = BufReader::new(File::open(path).with_context(name)?);
        return import::route_csv_routing(&mut input, None).with_context(name);
    }
    let trace = Trace::open(path)?;
    Routing::of_trace(&trace, Sidecar::read_beside(path)?.as_ref(), k).with_context(name)
}
