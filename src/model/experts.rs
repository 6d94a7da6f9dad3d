//! The expert table: for each MoE layer, the stacked tensors of which an expert is a slice, and where the slices lie.

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
}
