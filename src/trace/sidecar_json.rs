//! Reading a sidecar: JSON text, which anyone may have written, to a [`Sidecar`].
//!
//! [`Sidecar::from_slice`] parses the text, [`Sidecar::from_json`] takes the tree apart. Every number is checked for its
//! range, lists for the lengths that the shape gives, ids for being experts of their layer. Unknown keys are ignored;
//! the error says which key, what was wanted, what was found.

use std::fmt::Display;

use serde_json::{Map, Value};

use crate::error::{Result, err};
use crate::trace::block::{Phase, Placement};
use crate::trace::sidecar::{
    MAX_BYTES, Model, ModelFile, Resident, Settings, SettingsFrom, Shape, Sidecar, TokenRange, VERSION, resident_fault,
};

impl Sidecar {
    /// From the file's text.
    pub fn from_slice(text: &[u8]) -> Result<Self> {
        if text.len() as u64 > MAX_BYTES {
            return Err(err!(Format, "sidecar: at most {MAX_BYTES} bytes wanted, {} found", text.len()));
        }
        let value = serde_json::from_slice(text).map_err(|e| err!(Format, "sidecar: {e}"))?;
        Self::from_json(&value)
    }

    /// From JSON, checked: what this returns can be used without further care.
    pub fn from_json(value: &Value) -> Result<Self> {
        let root = Object::new(value, "sidecar")?;
        let version: u64 = root.number("hotset_sidecar")?;
        if version != VERSION {
            return Err(err!(Format, "sidecar: version {VERSION} wanted, {version} found"));
        }
        let shape = shape(&root.object("shape")?)?;
        let sidecar = Self {
            model: model(&root.object("model")?)?,
            score_space: root.text("score_space")?,
            settings: root.each("settings", |o| settings(o, &shape))?,
            ranges: root.each("ranges", |o| range(o, &shape))?,
            resident: root.each("resident", |o| resident(o, &shape))?,
            left_out: left_out(&root)?,
            row_range: root.flag("row_range")?,
            closed: root.flag("closed")?,
            error: match root.map.get("error") {
                None | Some(Value::Null) => None,
                Some(_) => Some(root.text("error")?),
            },
            expert_bytes: expert_bytes(&root, &shape)?,
            residency: residency(&root, &shape)?,
            more: more(&root)?,
            shape,
        };
        in_order("settings", sidecar.settings.iter().map(|s| (s.token, s.token)))?;
        in_order("resident", sidecar.resident.iter().map(|r| (r.before_token, r.before_token)))?;
        in_order("ranges", sidecar.ranges.iter().map(|r| (r.first, r.end())))?;
        Ok(sidecar)
    }
}

fn shape(o: &Object) -> Result<Shape> {
    let shape = Shape {
        blocks: o.numbers("blocks")?,
        n_experts: o.numbers("n_experts")?,
        k: o.number("k")?,
        top_m: o.number("top_m")?,
    };
    let n: usize = o.number("n_layers")?;
    if n == 0 || n != shape.n_experts.len() || n != shape.blocks.len() {
        let (blocks, experts) = (shape.blocks.len(), shape.n_experts.len());
        return Err(err!(Format, "{}: {n} layers, {blocks} blocks, n_experts of {experts} layers", o.at));
    }
    Ok(shape)
}

fn model(o: &Object) -> Result<Model> {
    let files = o.each("files", |f| Ok(ModelFile { name: f.text("name")?, length: f.number("length")? }))?;
    Ok(Model { files, architecture: o.text("architecture")? })
}

fn settings(o: &Object, shape: &Shape) -> Result<SettingsFrom> {
    let settings = Settings {
        lambda: o.float("lambda")?,
        top_j: o.number("top_j")?,
        delta: o.text("delta")?,
        drop: o.float("drop")?,
        renormalise: o.text("renormalise")?,
        slots: o.numbers("slots")?,
        policy: o.text("policy")?,
        backing: o.text("backing")?,
        io: o.text("io")?,
        prefill_moce: o.flag("prefill_moce")?,
        prefill_drop: o.flag("prefill_drop")?,
        more: more(o)?,
    };
    settings.check(shape.n_layers()).map_err(|e| err!(Format, "{}: {e}", o.at))?;
    Ok(SettingsFrom { token: o.number("from_token")?, settings })
}

fn range(o: &Object, shape: &Shape) -> Result<TokenRange> {
    let name = o.text("phase")?;
    let phase = Phase::from_name(&name).ok_or_else(|| err!(Format, "{}: unknown phase \"{name}\"", o.at))?;
    let one = |value: &Value| {
        let name = value.as_str().unwrap_or_default();
        Placement::from_name(name).ok_or_else(|| err!(Format, "{}: unknown placement {}", o.at, short(value)))
    };
    let placement = match o.get("placement")? {
        Value::Array(each) => each.iter().map(one).collect::<Result<Vec<_>>>()?,
        value => vec![one(value)?],
    };
    if placement.len() != 1 && placement.len() != shape.n_layers() {
        return Err(err!(Format, "{}: placement of {} layers, not {}", o.at, placement.len(), shape.n_layers()));
    }
    let range = TokenRange {
        first: o.number("first")?,
        n_tokens: o.number("tokens")?,
        phase,
        position: o.number("position")?,
        tokens_per_pass: o.number("tokens_per_pass")?,
        placement,
        left_out_before: if o.map.contains_key("left_out_before") { o.number("left_out_before")? } else { 0 },
    };
    if range.first.checked_add(range.n_tokens).is_none() || range.tokens_per_pass == 0 {
        let (first, n, per) = (range.first, range.n_tokens, range.tokens_per_pass);
        return Err(err!(Format, "{}: first {first}, tokens {n}, tokens_per_pass {per}", o.at));
    }
    Ok(range)
}

fn resident(o: &Object, shape: &Shape) -> Result<Resident> {
    let lists = o.list("layers")?;
    if lists.len() != shape.n_layers() {
        return Err(err!(Format, "{}: {} layers, not {}", o.at, lists.len(), shape.n_layers()));
    }
    let mut layers = Vec::with_capacity(lists.len());
    for (list, &n) in lists.iter().zip(&shape.n_experts) {
        let wrong = |found: String| {
            let layer = layers.len();
            err!(Format, "{}, layer {layer}: distinct ids below {n} wanted, {found} found", o.at)
        };
        let ids = list.as_array().ok_or_else(|| wrong(short(list)))?.iter();
        let ids: Vec<u16> = ids.map(|id| whole(id).ok_or_else(|| wrong(short(id)))).collect::<Result<_>>()?;
        if let Some(fault) = resident_fault(&ids, n) {
            return Err(wrong(fault));
        }
        layers.push(ids);
    }
    let state = o.map.get("state").cloned().unwrap_or_default();
    Ok(Resident { before_token: o.number("before_token")?, reason: o.text("reason")?, layers, state })
}

fn left_out(root: &Object) -> Result<std::collections::BTreeMap<String, u64>> {
    let o = root.object("left_out")?;
    o.map.keys().map(|reason| Ok((reason.clone(), o.number(reason)?))).collect()
}

fn more(o: &Object) -> Result<Map<String, Value>> {
    if o.map.contains_key("more") { Ok(o.object("more")?.map.clone()) } else { Ok(Map::new()) }
}

fn expert_bytes(root: &Object, shape: &Shape) -> Result<Vec<u64>> {
    if !root.map.contains_key("expert_bytes") {
        return Ok(Vec::new());
    }
    let wanted = "a list of whole numbers, one a layer,";
    let take = |v: &Value| v.as_array()?.iter().map(whole).collect::<Option<Vec<u64>>>();
    root.typed("expert_bytes", wanted, |v| take(v).filter(|list| list.len() == shape.n_layers()))
}

fn residency(root: &Object, shape: &Shape) -> Result<Vec<String>> {
    if !root.map.contains_key("residency") {
        return Ok(Vec::new());
    }
    let digits = (shape.n_layers() as u64).checked_mul(shape.top_m.into());
    let token = |(i, value): (usize, &Value)| match value.as_str() {
        Some(text) if Some(text.len() as u64) == digits && text.bytes().all(|b| matches!(b, b'0'..=b'2')) => {
            Ok(text.to_owned())
        }
        _ => {
            let n = digits.unwrap_or(u64::MAX);
            Err(err!(Format, "{}.residency[{i}]: {n} digits 0 to 2 wanted, {} found", root.at, short(value)))
        }
    };
    root.list("residency")?.iter().enumerate().map(token).collect()
}

/// Each one (first, end) begins no earlier than the one before it ends.
fn in_order(what: &str, spans: impl Iterator<Item = (u64, u64)>) -> Result<()> {
    let mut end = 0;
    for (i, (first, next)) in spans.enumerate() {
        if first < end {
            return Err(err!(Format, "sidecar.{what}[{i}]: begins at token {first}, the one before ends at {end}"));
        }
        end = next;
    }
    Ok(())
}

/// A JSON object, and where it is.
struct Object<'a> {
    map: &'a Map<String, Value>,
    at: String,
}

impl<'a> Object<'a> {
    fn new(value: &'a Value, at: impl Display) -> Result<Self> {
        match value.as_object() {
            Some(map) => Ok(Self { map, at: at.to_string() }),
            None => Err(err!(Format, "{at}: an object wanted, {} found", short(value))),
        }
    }

    fn get(&self, key: &str) -> Result<&'a Value> {
        self.map.get(key).ok_or_else(|| err!(Format, "{}: no key \"{}\"", self.at, short_text(key)))
    }

    /// The value of a key, if `take` can make something of it.
    fn typed<T>(&self, key: &str, wanted: &str, take: impl Fn(&'a Value) -> Option<T>) -> Result<T> {
        let value = self.get(key)?;
        let key = short_text(key);
        take(value).ok_or_else(|| err!(Format, "{}.{key}: {wanted} wanted, {} found", self.at, short(value)))
    }

    fn number<T: TryFrom<u64> + TryFrom<i64>>(&self, key: &str) -> Result<T> {
        self.typed(key, "a whole number in range", whole)
    }

    fn numbers(&self, key: &str) -> Result<Vec<u32>> {
        self.typed(key, "a list of whole numbers", |v| v.as_array()?.iter().map(whole).collect())
    }

    fn float(&self, key: &str) -> Result<f64> {
        self.typed(key, "a number", |v| v.as_f64().filter(|x| x.is_finite()))
    }

    fn flag(&self, key: &str) -> Result<bool> {
        self.typed(key, "true or false", Value::as_bool)
    }

    fn text(&self, key: &str) -> Result<String> {
        self.typed(key, "a string", |v| v.as_str().map(str::to_owned))
    }

    fn list(&self, key: &str) -> Result<&'a Vec<Value>> {
        self.typed(key, "a list", Value::as_array)
    }

    fn object(&self, key: &str) -> Result<Self> {
        Self::new(self.get(key)?, format_args!("{}.{key}", self.at))
    }

    fn each<T>(&self, key: &str, take: impl Fn(&Object) -> Result<T>) -> Result<Vec<T>> {
        let list = self.list(key)?.iter().enumerate();
        list.map(|(i, value)| take(&Object::new(value, format_args!("{}.{key}[{i}]", self.at))?)).collect()
    }
}

fn whole<T: TryFrom<u64> + TryFrom<i64>>(value: &Value) -> Option<T> {
    match value.as_u64() {
        Some(n) => T::try_from(n).ok(),
        None => T::try_from(value.as_i64()?).ok(),
    }
}

/// A value as a message can hold it.
fn short(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(map) => format!("an object of {} keys", map.len()),
        other => short_text(&other.to_string()),
    }
}

fn short_text(text: &str) -> String {
    let mut short: String = text.chars().take(60).collect();
    if short.len() < text.len() {
        short.push_str("...");
    }
    short
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn made() -> Sidecar {
        let range = TokenRange {
            first: 0,
            n_tokens: 4,
            phase: Phase::Prefill,
            position: -1,
            tokens_per_pass: 4,
            placement: vec![Placement::Slots, Placement::PassThrough],
            left_out_before: 0,
        };
        let mut more = Map::new();
        more.insert("ema_decay".into(), json!(0.99));
        Sidecar {
            model: Model {
                files: vec![ModelFile { name: "a \"b\".gguf".into(), length: u64::MAX }],
                architecture: "x".into(),
            },
            shape: Shape { blocks: vec![1, 3], n_experts: vec![8, 4], k: 2, top_m: 4 },
            score_space: "logit".into(),
            settings: vec![SettingsFrom {
                token: 0,
                settings: Settings { lambda: 0.1, slots: vec![4, 4], more, ..Settings::default() },
            }],
            ranges: vec![
                range.clone(),
                TokenRange { first: 4, phase: Phase::Decode, placement: vec![Placement::Mapped], ..range },
            ],
            resident: vec![
                Resident {
                    before_token: 0,
                    reason: "start".into(),
                    layers: vec![vec![7, 0], vec![]],
                    state: Value::Null,
                },
                Resident {
                    before_token: 4,
                    reason: "x".into(),
                    layers: vec![vec![], vec![3]],
                    state: json!({"a": [1]}),
                },
            ],
            left_out: [("queue full".to_owned(), 3)].into(),
            row_range: true,
            closed: false,
            error: Some("disk".into()),
            expert_bytes: vec![100, 200],
            residency: vec!["01201201".into(), "00000000".into()],
            more: [("cut".to_owned(), json!({ "start": 1 }))].into_iter().collect(),
        }
    }

    #[test]
    fn json_and_text_round_trip() {
        for sidecar in [made(), Sidecar { resident: vec![], error: None, residency: vec![], ..made() }] {
            assert_eq!(Sidecar::from_json(&sidecar.to_json()).unwrap(), sidecar);
            let mut text = Vec::new();
            sidecar.write_to(&mut text).unwrap();
            assert_eq!(Sidecar::from_slice(&text).unwrap(), sidecar);
            assert_eq!(serde_json::from_slice::<Value>(&text).unwrap(), sidecar.to_json());
        }
    }

    #[test]
    fn keys_of_later_versions_are_ignored() {
        let mut value = made().to_json();
        value["new"] = json!([1, 2]);
        value["ranges"][0]["new"] = json!({});
        assert_eq!(Sidecar::from_json(&value).unwrap(), made());
    }

    #[test]
    fn faults_are_named() {
        // where, what is put there, what the error must say
        let faults = [
            ("/hotset_sidecar", json!(2), "version 1 wanted, 2 found"),
            ("/closed", json!(1), "sidecar.closed: true or false wanted, 1 found"),
            ("/model/files/0/length", json!(-1), "sidecar.model.files[0].length"),
            ("/shape/n_layers", json!(3), "3 layers, 2 blocks"),
            ("/shape/k", json!(1.5), "1.5 found"),
            ("/settings/0/slots", json!([1]), "slots of 1 layers"),
            ("/settings/0/lambda", json!(null), "a number wanted, null found"),
            ("/settings/0/more", json!([]), "settings[0].more: an object wanted, a list of 0 found"),
            ("/ranges/0/phase", json!("warm"), "unknown phase \"warm\""),
            ("/ranges/0/placement/1", json!(7), "unknown placement 7"),
            ("/ranges/1/placement", json!([]), "placement of 0 layers"),
            ("/ranges/1/tokens", json!(u64::MAX), "first 4"),
            ("/ranges/1/tokens_per_pass", json!(0), "tokens_per_pass 0"),
            ("/ranges/1/first", json!(3), "begins at token 3, the one before ends at 4"),
            ("/resident/0/layers", json!([[]]), "1 layers, not 2"),
            ("/resident/0/layers/1", json!([4]), "layer 1: distinct ids below 4 wanted, 4 found"),
            ("/resident/0/layers/0", json!([2, 5, 2]), "2 twice found"),
            ("/resident/0/layers/0", json!([70000]), "70000 found"),
            ("/resident/0/before_token", json!(5), "sidecar.resident[1]: begins"),
            ("/left_out", json!({"a": "b"}), "left_out.a"),
            (
                "/expert_bytes",
                json!([1]),
                "expert_bytes: a list of whole numbers, one a layer, wanted, a list of 1 found",
            ),
            ("/residency/1", json!("0120120"), "residency[1]: 8 digits 0 to 2 wanted, \"0120120\" found"),
            ("/residency/0", json!("01234567"), "residency[0]"),
            ("/more", json!(3), "sidecar.more: an object wanted, 3 found"),
        ];
        for (at, fault, says) in faults {
            let mut value = made().to_json();
            *value.pointer_mut(at).unwrap() = fault;
            let error = Sidecar::from_json(&value).unwrap_err().detail;
            assert!(error.contains(says), "{at}: {error}");
        }
        for text in ["", "[]", "{", "{}", &"[".repeat(100_000)] {
            assert!(Sidecar::from_slice(text.as_bytes()).is_err());
        }
    }

    #[test]
    fn the_trace_must_have_the_same_shape() {
        let header = crate::trace::Header { n_layers: 2, n_experts: 8, top_m: 4, n_tokens: 0 };
        made().check_header(&header).unwrap();
        for wrong in [
            crate::trace::Header { n_layers: 3, ..header },
            crate::trace::Header { n_experts: 7, ..header },
            crate::trace::Header { top_m: 5, ..header },
        ] {
            assert!(made().check_header(&wrong).is_err());
        }
        assert_eq!(made().described_tokens(), 8);
    }
}
