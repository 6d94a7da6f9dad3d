//! The sidecar `<trace>.json`: what Q4RT v1 has no room for.
//!
//! Which model and shape, which settings from which token on, what each range of tokens was, what was resident when
//! recording began and after every gap (so that a replay starts from the same cache), how many tokens were left out and
//! why. A trace without a sidecar is legal.
//!
//! The recorder's writer thread fills a [`Sidecar`] and replaces the file whole ([`Sidecar::write`]: a temporary file,
//! then a rename), so a reader sees an old or a new one, never a part. Tools read it with [`Sidecar::read`], which is
//! in `sidecar_json`. Keys that a reader does not know are ignored.
//!
//! A writer that was killed leaves `closed` false, and perhaps tokens in the trace after the last range: nothing is
//! known about those, not even whether a gap lies before them ([`Sidecar::described_tokens`]).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::error::{Error, Result, err};
use crate::trace::block::{Phase, Placement};
use crate::trace::q4rt::Header;

/// The value of the key `hotset_sidecar`.
pub const VERSION: u64 = 1;

/// A longer file is refused; a recorder stops long before.
pub const MAX_BYTES: u64 = 64 << 20;

/// A file beside the trace: its name and an ending more.
fn beside(trace: &Path, ending: &str) -> PathBuf {
    let mut name = trace.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Where the sidecar of a trace lies: `<trace>.json`.
pub fn sidecar_path(trace: &Path) -> PathBuf {
    beside(trace, ".json")
}

/// Where the whole-row ranges of a trace lie, if they were recorded: `<trace>.range`.
pub fn range_path(trace: &Path) -> PathBuf {
    beside(trace, ".range")
}

/// One of the model's files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelFile {
    pub name: String,
    /// Length in bytes.
    pub length: u64,
}

/// Which model was run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Model {
    /// Shards in their order.
    pub files: Vec<ModelFile>,
    pub architecture: String,
}

/// The shape of the router, layer by layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// The model's block index of each layer of the trace.
    pub blocks: Vec<u32>,
    /// Experts of each layer of the trace.
    pub n_experts: Vec<u32>,
    /// Experts that a token uses in a layer.
    pub k: u32,
    /// Candidates in a record.
    pub top_m: u32,
}

impl Shape {
    /// Layers of the trace.
    pub fn n_layers(&self) -> usize {
        self.n_experts.len()
    }
}

/// How the run decided. Names are those of the settings' own enums; this room only carries them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// Bonus of resident experts, in units of the delta; 0 = no reranking.
    pub lambda: f64,
    /// Ranks that get the bonus whether resident or not.
    pub top_j: u32,
    /// What lambda multiplies: `token_topk`, `token_full`, `running_full`.
    pub delta: String,
    /// Cold drop's F; 0 = nothing is dropped.
    pub drop: f64,
    /// `auto`, `on` or `off`.
    pub renormalise: String,
    /// Slots of each layer.
    pub slots: Vec<u32>,
    /// Eviction policy.
    pub policy: String,
    /// `slots` or `page_cache`.
    pub backing: String,
    /// `direct`, `buffered`, ...
    pub io: String,
    /// Whether prefill passes are reranked.
    pub prefill_moce: bool,
    /// Whether prefill passes drop.
    pub prefill_drop: bool,
    /// Further settings by their names, such as a policy's own numbers.
    pub more: Map<String, Value>,
}

impl Settings {
    /// An error if a reader would refuse them: JSON has no infinity and no NaN, and a page-cache run alone has no slots.
    pub fn check(&self, n_layers: usize) -> Result<()> {
        if !self.slots.is_empty() && self.slots.len() != n_layers {
            return Err(err!(Argument, "settings: slots of {} layers, {n_layers} wanted", self.slots.len()));
        }
        if !self.lambda.is_finite() || !self.drop.is_finite() {
            return Err(err!(Argument, "settings: lambda {}, drop {}: not finite", self.lambda, self.drop));
        }
        Ok(())
    }
}

/// Settings, and the first token for which they hold.
#[derive(Clone, Debug, PartialEq)]
pub struct SettingsFrom {
    pub token: u64,
    pub settings: Settings,
}

/// Consecutive tokens of the trace that were run alike, at consecutive positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenRange {
    /// Index in the trace.
    pub first: u64,
    pub n_tokens: u64,
    pub phase: Phase,
    /// The first token's position in its sequence; negative = not known, and then of all of them.
    pub position: i64,
    /// Tokens that a pass had, those that were left out included.
    pub tokens_per_pass: u32,
    /// One for all layers, or one a layer.
    pub placement: Vec<Placement>,
    /// Tokens of the (single) pass before `first` that were left out because a layer did not see them. Where this is
    /// not 0 and the placement is slots, what was resident just before `first` is not known.
    pub left_out_before: u32,
}

impl TokenRange {
    /// The first token after it. Saturates, as ranges may come from a file.
    pub fn end(&self) -> u64 {
        self.first.saturating_add(self.n_tokens)
    }
}

/// What was resident just before a token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resident {
    pub before_token: u64,
    /// Why it had to be noted: `start`, or what made a gap.
    pub reason: String,
    /// Of each layer the resident experts, oldest use first.
    pub layers: Vec<Vec<u16>>,
    /// What else a replay needs to go on from here (counters of a policy, running means): `null` if nothing.
    pub state: Value,
}

/// What is wrong with a layer's resident ids, if anything: an expert that it does not have, or one twice.
pub(super) fn resident_fault(ids: &[u16], n_experts: u32) -> Option<String> {
    let mut sorted = ids.to_vec();
    sorted.sort_unstable();
    let twice = sorted.windows(2).find(|w| w[0] == w[1]).map(|w| format!("{} twice", w[0]));
    sorted.last().filter(|&&id| u32::from(id) >= n_experts).map(ToString::to_string).or(twice)
}

/// The whole sidecar.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sidecar {
    pub model: Model,
    pub shape: Shape,
    /// What the scores are: `logit`, `log_prob`, `prob`, `biased_prob`, ...
    pub score_space: String,
    /// By rising token.
    pub settings: Vec<SettingsFrom>,
    /// By rising token, not overlapping.
    pub ranges: Vec<TokenRange>,
    /// By rising token; the first is before token 0.
    pub resident: Vec<Resident>,
    /// Tokens that are not in the trace, by reason.
    pub left_out: BTreeMap<String, u64>,
    /// `<trace>.range` holds the range (max - min) of each whole row of scores: f32 per token and layer.
    pub row_range: bool,
    /// The recorder came to its end.
    pub closed: bool,
    /// Why writing stopped early, if it did.
    pub error: Option<String>,
    /// Bytes of one expert of each layer; empty = not known.
    pub expert_bytes: Vec<u64>,
    /// Of each token a string with a digit for each layer and rank, ranks innermost: what the run that was imported found
    /// resident (0 miss, 1 hit, 2 first use of a prefetched expert). Empty = not known.
    pub residency: Vec<String>,
    /// Further facts by their names, which this room only carries: `import`, `synth`, `cut`, `joined`.
    pub more: Map<String, Value>,
}

impl Sidecar {
    /// Tokens from the first on that the ranges cover without a hole: of those after them nothing is known.
    pub fn described_tokens(&self) -> u64 {
        self.ranges.iter().fold(0, |end, range| if range.first == end { range.end() } else { end })
    }

    /// An error if the trace beside it has another shape.
    pub fn check_header(&self, header: &Header) -> Result<()> {
        let (n_layers, top_m) = (self.shape.n_layers(), self.shape.top_m);
        if n_layers != usize::from(header.n_layers) || top_m != u32::from(header.top_m) {
            return Err(err!(
                Format,
                "sidecar of {n_layers} layers, top_m {top_m}; trace of {} layers, top_m {}",
                header.n_layers,
                header.top_m
            ));
        }
        match self.shape.n_experts.iter().position(|&n| n > u32::from(header.n_experts)) {
            Some(layer) => Err(err!(
                Format,
                "sidecar: {} experts in layer {layer}; trace: {}",
                self.shape.n_experts[layer],
                header.n_experts
            )),
            None => Ok(()),
        }
    }

    /// All of it as JSON.
    pub fn to_json(&self) -> Value {
        let mut value = self.head_json();
        value["resident"] = self.resident.iter().map(resident_json).collect();
        if !self.residency.is_empty() {
            value["residency"] = json!(self.residency);
        }
        value
    }

    /// All but `resident` and `residency`, which hold thousands of ids an entry.
    fn head_json(&self) -> Value {
        let files: Value = self.model.files.iter().map(|f| json!({ "name": f.name, "length": f.length })).collect();
        let mut value = json!({
            "hotset_sidecar": VERSION,
            "closed": self.closed,
            "error": self.error,
            "model": { "files": files, "architecture": self.model.architecture },
            "shape": {
                "n_layers": self.shape.n_layers(),
                "blocks": self.shape.blocks,
                "n_experts": self.shape.n_experts,
                "k": self.shape.k,
                "top_m": self.shape.top_m,
            },
            "score_space": self.score_space,
            "row_range": self.row_range,
            "settings": self.settings.iter().map(settings_json).collect::<Value>(),
            "ranges": self.ranges.iter().map(range_json).collect::<Value>(),
            "left_out": self.left_out,
        });
        if !self.expert_bytes.is_empty() {
            value["expert_bytes"] = json!(self.expert_bytes);
        }
        if !self.more.is_empty() {
            value["more"] = Value::Object(self.more.clone());
        }
        value
    }

    /// Writes it as text, an entry of `resident` at a time, so that a long one does not become a tree of values first.
    pub fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        let head = self.head_json().to_string();
        out.write_all(&head.as_bytes()[..head.len() - 1])?;
        out.write_all(b",\"resident\":[")?;
        for (i, resident) in self.resident.iter().enumerate() {
            write!(
                out,
                "{}{{\"before_token\":{},\"reason\":{},\"state\":{},\"layers\":",
                if i == 0 { "\n" } else { ",\n" },
                resident.before_token,
                json!(resident.reason),
                resident.state
            )?;
            serde_json::to_writer(&mut *out, &resident.layers)?;
            out.write_all(b"}")?;
        }
        out.write_all(b"]")?;
        for (i, token) in self.residency.iter().enumerate() {
            write!(out, "{}{}", if i == 0 { ",\"residency\":[\n" } else { ",\n" }, json!(token))?;
        }
        out.write_all(if self.residency.is_empty() { b"}\n" } else { b"]}\n" })
    }

    /// Replaces the file in one step: written beside it, then renamed. Returns its length in bytes. `durable`: it is
    /// also on the device before the rename.
    pub fn write(&self, path: &Path, durable: bool) -> Result<u64> {
        let beside = beside(path, ".tmp");
        let write = || -> io::Result<u64> {
            let mut out = BufWriter::new(File::create(&beside)?);
            self.write_to(&mut out)?;
            let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
            if durable {
                file.sync_data()?;
            }
            let length = file.metadata()?.len();
            fs::rename(&beside, path)?;
            Ok(length)
        };
        write().map_err(|e: io::Error| {
            // what is left of a failed write helps nobody
            let _ = fs::remove_file(&beside);
            err!(Io, "{}: {e}", path.display())
        })
    }

    /// Reads a sidecar file. One that is not there is an error of kind `Io`: ask [`Sidecar::read_beside`].
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display();
        let at = |e: Error| Error::new(e.kind, format!("{name}: {e}"));
        let length = fs::metadata(path).map_err(|e| err!(Io, "{name}: {e}"))?.len();
        if length > MAX_BYTES {
            return Err(err!(Format, "{name}: at most {MAX_BYTES} bytes wanted, {length} found"));
        }
        let bytes = fs::read(path).map_err(|e| err!(Io, "{name}: {e}"))?;
        Self::from_slice(&bytes).map_err(at)
    }

    /// The sidecar of a trace, or `None` if it has none.
    pub fn read_beside(trace: &Path) -> Result<Option<Self>> {
        let path = sidecar_path(trace);
        match fs::exists(&path) {
            Ok(false) => Ok(None),
            _ => Self::read(&path).map(Some),
        }
    }
}

/// Reads `<trace>.range`: of each whole token, of each layer, the range (max - min) of the row's scores.
pub fn read_ranges(trace: &Path, n_layers: usize) -> Result<Vec<f32>> {
    let path = range_path(trace);
    let bytes = fs::read(&path).map_err(|e| err!(Io, "{}: {e}", path.display()))?;
    let values = bytes.len() / 4;
    let whole = values - values.checked_rem(n_layers).unwrap_or(values);
    Ok(bytes.chunks_exact(4).take(whole).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

fn settings_json(from: &SettingsFrom) -> Value {
    let s = &from.settings;
    let mut value = json!({
        "from_token": from.token,
        "lambda": s.lambda,
        "top_j": s.top_j,
        "delta": s.delta,
        "drop": s.drop,
        "renormalise": s.renormalise,
        "slots": s.slots,
        "policy": s.policy,
        "backing": s.backing,
        "io": s.io,
        "prefill_moce": s.prefill_moce,
        "prefill_drop": s.prefill_drop,
    });
    if !s.more.is_empty() {
        value["more"] = Value::Object(s.more.clone());
    }
    value
}

fn range_json(range: &TokenRange) -> Value {
    let placement: Value = match range.placement.as_slice() {
        [one] => one.as_str().into(),
        each => each.iter().map(|p| p.as_str()).collect(),
    };
    let mut value = json!({
        "first": range.first,
        "tokens": range.n_tokens,
        "phase": range.phase.as_str(),
        "position": range.position,
        "tokens_per_pass": range.tokens_per_pass,
        "placement": placement,
    });
    if range.left_out_before > 0 {
        value["left_out_before"] = range.left_out_before.into();
    }
    value
}

fn resident_json(resident: &Resident) -> Value {
    json!({
        "before_token": resident.before_token,
        "reason": resident.reason,
        "state": resident.state,
        "layers": resident.layers,
    })
}
