//! The expert table: for each MoE layer, the stacked tensors of which an expert is a slice, and where the slices lie.
//!
//! `ExpertTable::find` takes the tensor list of all files, picks the expert tensors by name (`parse_name`), measures
//! each (`slice`: the stride by the type's arithmetic must be the stride on disk), and checks that each layer is
//! complete (`check_layer`). What the names and shapes say is all that is used; there is no list of architectures.

use std::collections::BTreeMap;
use std::path::Path;

use super::gguf::TensorInfo;
use super::quant;
use crate::error::{Error, Result, err};

/// Which matrix of the feed-forward network a tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Projection {
    Gate,
    Up,
    /// Gate and up in one tensor (`ffn_gate_up_exps`).
    GateUp,
    Down,
}

/// The matrix itself, or a small companion that the engine picks by the same expert id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// `….weight`: the quantised matrix.
    Weight,
    /// `….bias`: one row of f32 an expert.
    Bias,
    /// `….scale`: one f32 an expert.
    Scale,
}

/// One stacked tensor; expert `e` is the `slice_bytes` at `offset_bytes + e * slice_bytes` of file `file`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertTensor {
    /// The name in the file, for example `blk.3.ffn_gate_exps.weight`.
    pub name: String,
    pub projection: Projection,
    pub part: Part,
    /// ggml's type number.
    pub ggml_type: u32,
    /// Index into the model's files (a shard each).
    pub file: usize,
    /// From the start of that file, not of its data section.
    pub offset_bytes: u64,
    /// Bytes of one expert in this tensor, and the distance from one expert to the next.
    pub slice_bytes: u64,
}

/// One layer that has experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeLayer {
    /// The block number in the file: `3` in `blk.3.`. Layers without experts have no entry, so blocks may have gaps.
    pub block: u32,
    pub n_experts: u32,
    /// Ordered by part, then projection: the weights first.
    pub tensors: Vec<ExpertTensor>,
}

impl MoeLayer {
    /// Bytes of one expert, its companions included.
    pub fn expert_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.slice_bytes).sum()
    }
}

/// All MoE layers, by ascending block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpertTable {
    pub layers: Vec<MoeLayer>,
}

impl ExpertTable {
    /// The largest number of experts of any layer; 0 without layers.
    pub fn n_experts(&self) -> u32 {
        self.layers.iter().map(|l| l.n_experts).max().unwrap_or(0)
    }

    /// Finds the experts among `tensors`; `files` are the paths that their `file` indexes, for errors.
    ///
    /// `Model` where a layer is incomplete, its tensors disagree on the number of experts, or a type is unknown;
    /// `Format` where the offsets in a file disagree with the type.
    pub fn find(tensors: &[TensorInfo], files: &[&Path]) -> Result<Self> {
        let in_file = |t: &TensorInfo, e: Error| match files.get(t.file) {
            Some(file) => Error::new(e.kind, format!("{}: {}", file.display(), e.detail)),
            None => e,
        };
        let mut blocks: BTreeMap<u32, Vec<Member>> = BTreeMap::new();
        for info in tensors {
            let Some(name) = parse_name(&info.name) else { continue };
            let (n_experts, tensor) = slice(info, &name).map_err(|e| in_file(info, e))?;
            blocks.entry(name.block).or_default().push(Member { info, n_experts, tensor });
        }
        let gated = blocks.values().flatten().any(|m| matches!(m.tensor.projection, Projection::Gate));
        let mut layers = Vec::new();
        for (block, mut members) in blocks {
            members.sort_by_key(|m| (m.tensor.part, m.tensor.projection));
            check_layer(block, &members, gated).map_err(|e| in_file(members[0].info, e))?;
            let n_experts = members[0].n_experts;
            layers.push(MoeLayer { block, n_experts, tensors: members.into_iter().map(|m| m.tensor).collect() });
        }
        Ok(Self { layers })
    }

    /// The index of the layer with this block number; `Range` where the block has no experts.
    pub fn layer_index(&self, block: u32) -> Result<usize> {
        // Mostly blocks are the indices.
        match self.layers.get(block as usize) {
            Some(l) if l.block == block => Ok(block as usize),
            _ => self.layers.binary_search_by_key(&block, |l| l.block).map_err(|_| {
                err!(Range, "block {block} is no layer with experts; there are {} of them", self.layers.len())
            }),
        }
    }

    /// Bytes of all experts of all layers, companions included.
    pub fn total_bytes(&self) -> u64 {
        self.layers.iter().map(|l| l.expert_bytes() * u64::from(l.n_experts)).sum()
    }
}

/// An expert tensor while its layer is being put together.
struct Member<'a> {
    info: &'a TensorInfo,
    n_experts: u32,
    tensor: ExpertTensor,
}

/// What an expert tensor's name says.
struct Name {
    block: u32,
    projection: Projection,
    part: Part,
}

/// Reads `blk.N.ffn_{gate,up,down,gate_up}_exps.{weight,bias,scale}`; `None` for every other name.
///
/// Shared experts (`_shexp`), grouped ones (`_chexps`), `ffn_norm_exps` and `.input_scale` are not picked by expert
/// id in the graph, so they are dense weights to us.
fn parse_name(name: &str) -> Option<Name> {
    let mut fields = name.split('.');
    let ("blk", number, stem, part, None) =
        (fields.next()?, fields.next()?, fields.next()?, fields.next()?, fields.next())
    else {
        return None;
    };
    let block: u32 = number.parse().ok()?;
    // "03" or "+3" would be a second name for block 3.
    if block.to_string() != number {
        return None;
    }
    let projection = match stem {
        "ffn_gate_exps" => Projection::Gate,
        "ffn_up_exps" => Projection::Up,
        "ffn_gate_up_exps" => Projection::GateUp,
        "ffn_down_exps" => Projection::Down,
        _ => return None,
    };
    let part = match part {
        "weight" => Part::Weight,
        "bias" => Part::Bias,
        "scale" => Part::Scale,
        _ => return None,
    };
    Some(Name { block, projection, part })
}

/// The number of experts in a tensor, and where their slices lie.
fn slice(info: &TensorInfo, name: &Name) -> Result<(u32, ExpertTensor)> {
    // The experts are the last dimension: weight [in, out, E], bias [out, E], scale [E].
    let axis = match name.part {
        Part::Weight => 2,
        Part::Bias => 1,
        Part::Scale => 0,
    };
    let ne = info.ne;
    if ne[axis + 1..].iter().any(|n| *n != 1) || ne[..axis].contains(&0) {
        let wanted = ["[experts]", "[out, experts]", "[in, out, experts]"][axis];
        return Err(err!(Model, "tensor {} has the shape {ne:?}, {wanted} is wanted", info.name));
    }
    let n_experts = u16::try_from(ne[axis])
        .ok()
        .filter(|n| *n > 0)
        .ok_or_else(|| err!(Model, "tensor {} has {} experts, 1 to {} are possible", info.name, ne[axis], u16::MAX))?;
    let Some(bytes) = info.bytes else {
        let (name, number) = (&info.name, info.ggml_type);
        return Err(err!(
            Model,
            "tensor {name} has ggml type {number}, which is not known: its experts cannot be found"
        ));
    };
    // Scales of a type with blocks of several elements would share a block between experts.
    let block = quant::type_info(info.ggml_type).map_or(1, |t| u64::from(t.block));
    let slice_bytes = bytes / u64::from(n_experts);
    if axis == 0 && block != 1 || slice_bytes * u64::from(n_experts) != bytes {
        let kind = quant::type_name(info.ggml_type);
        return Err(err!(Model, "tensor {} of type {kind}: one expert is not a whole number of blocks", info.name));
    }
    if !info.fits(bytes) {
        return Err(info.layout_error());
    }
    let tensor = ExpertTensor {
        name: info.name.clone(),
        projection: name.projection,
        part: name.part,
        ggml_type: info.ggml_type,
        file: info.file,
        offset_bytes: info.offset_bytes,
        slice_bytes,
    };
    Ok((n_experts.into(), tensor))
}

/// Checks that the tensors of a block make whole experts. `gated`: some layer of the model has a gate of its own.
fn check_layer(block: u32, members: &[Member], gated: bool) -> Result<()> {
    use Projection::{Down, Gate, GateUp, Up};
    let weight = |p| members.iter().find(|m| m.tensor.part == Part::Weight && m.tensor.projection == p);
    let shapes: Vec<Projection> = [Gate, Up, GateUp, Down].into_iter().filter(|p| weight(*p).is_some()).collect();
    let complete = match shapes[..] {
        [Gate, Up, Down] | [GateUp, Down] => true,
        // Some models have no gate at all; then no layer has one, and nothing is missing.
        [Up, Down] => !gated,
        _ => false,
    };
    if !complete {
        return Err(err!(
            Model,
            "block {block} has the expert weights {shapes:?}: gate, up and down, or gate_up and down, are wanted"
        ));
    }
    let first = &members[0];
    if let Some(m) = members.iter().find(|m| m.n_experts != first.n_experts) {
        return Err(err!(
            Model,
            "block {block}: tensor {} has {} experts, tensor {} has {}",
            first.tensor.name,
            first.n_experts,
            m.tensor.name,
            m.n_experts
        ));
    }
    for m in members {
        let p = m.tensor.projection;
        // The engine applies the up scale to a fused gate_up.
        let owner = weight(p).or_else(|| weight(GateUp).filter(|_| p == Up && m.tensor.part == Part::Scale));
        let Some(owner) = owner else {
            return Err(err!(Model, "tensor {} belongs to a weight that block {block} does not have", m.tensor.name));
        };
        let (name, out) = (&m.tensor.name, owner.info.ne[1]);
        if m.tensor.part == Part::Bias && m.info.ne[0] != out {
            return Err(err!(Model, "tensor {name} has {} values an expert, its weight {out} rows", m.info.ne[0]));
        }
        let Some(down) = weight(Down).filter(|_| m.tensor.part == Part::Weight) else { continue };
        let width = down.info.ne[0];
        let fits = match p {
            Gate | Up => out == width,
            GateUp => width.checked_mul(2) == Some(out),
            Down => true,
        };
        if !fits {
            let down = &down.tensor.name;
            return Err(err!(Model, "tensor {name} has {out} rows an expert, {down} takes {width} inputs"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let read = |n| parse_name(n).map(|n| (n.block, n.projection, n.part));
        assert_eq!(read("blk.3.ffn_gate_exps.weight"), Some((3, Projection::Gate, Part::Weight)));
        assert_eq!(read("blk.120.ffn_gate_up_exps.bias"), Some((120, Projection::GateUp, Part::Bias)));
        assert_eq!(read("blk.0.ffn_down_exps.scale"), Some((0, Projection::Down, Part::Scale)));
        for dense in [
            "blk.03.ffn_gate_exps.weight",
            "blk.+3.ffn_gate_exps.weight",
            "blk.-1.ffn_gate_exps.weight",
            "blk.3.ffn_gate_exps.weight.x",
            "blk.3.ffn_gate_exps",
            "blk.3.ffn_gate_exps.input_scale",
            "blk.3.ffn_gate_chexps.weight",
            "blk.3.ffn_norm_exps.weight",
            "blk.3.ffn_up_shexp.weight",
            "ffn_up_exps.weight",
            "",
        ] {
            assert!(read(dense).is_none(), "{dense}");
        }
    }
}
