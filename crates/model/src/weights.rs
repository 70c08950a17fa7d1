//! Typed names for the tensors of a model.
//!
//! Files differ in layout: DeltaNet projections fused or split, queries interleaved with gates, attention
//! projections fused or not. Rows of a quantised matrix are independent, so every layout is a choice of
//! rows: a [`MatrixInfo`] lists the row ranges it is made of, and behind it there is only one layout.

use quant::Type;

/// Consecutive rows of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Index into [`gguf::Gguf::tensors`].
    pub tensor: usize,
    /// First row.
    pub first: usize,
    /// Number of rows.
    pub rows: usize,
}

/// A weight matrix in the file: [rows = outputs, cols = inputs].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixInfo {
    /// Name of the tensor it comes from, and of the part if it is not the whole.
    pub name: String,
    /// Type of its blocks.
    pub ty: Type,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Where its rows are, in order.
    pub parts: Vec<Part>,
}

impl MatrixInfo {
    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.ty.bytes(self.cols).expect("checked when the file was opened")
    }

    /// Bytes of the whole matrix.
    pub fn bytes(&self) -> usize {
        self.rows * self.row_bytes()
    }
}

/// A vector (or a small table) in the file, used as f32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VectorInfo {
    /// Name of the tensor.
    pub name: String,
    /// Index into [`gguf::Gguf::tensors`].
    pub tensor: usize,
    /// Numbers in it.
    pub len: usize,
}

/// A weight matrix in owned host memory, still in file form: [rows = outputs, cols = inputs].
#[derive(Clone, Debug)]
pub struct ResidentMatrix {
    /// Name for messages.
    pub name: String,
    /// Type of its blocks.
    pub ty: Type,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// rows · row_bytes bytes.
    pub bytes: Box<[u8]>,
}

impl ResidentMatrix {
    /// The blocks of one row.
    pub fn row(&self, index: usize) -> &[u8] {
        let len = self.bytes.len() / self.rows;
        &self.bytes[index * len..(index + 1) * len]
    }
}

/// The dense weights of a model: everything but routed experts and the token embedding. `M` is a matrix
/// and `V` a vector, in whatever memory a backend keeps them.
#[derive(Clone, Debug)]
pub struct Weights<M, V> {
    /// The trunk's layers.
    pub layers: Vec<Layer<M, V>>,
    /// Norm before the output projection: [hidden].
    pub output_norm: V,
    /// Output projection: [vocab, hidden]; the embedding itself in tied models.
    pub output: M,
}

/// Dense weights of a layer.
#[derive(Clone, Debug)]
pub struct Layer<M, V> {
    /// Norm before the mixer: [hidden].
    pub norm: V,
    /// The mixer.
    pub mixer: Mixer<M, V>,
    /// Router and shared expert.
    pub moe: MoeWeights<M, V>,
}

/// Weights of a layer's mixer.
#[derive(Clone, Debug)]
pub enum Mixer<M, V> {
    /// Gated DeltaNet.
    Delta(DeltaWeights<M, V>),
    /// Gated attention.
    Attention(AttentionWeights<M, V>),
}

/// Weights of a DeltaNet mixer.
#[derive(Clone, Debug)]
pub struct DeltaWeights<M, V> {
    /// q of every key head, then k, then v of every value head: [2·key + value, hidden].
    pub qkv: M,
    /// Output gate: [value, hidden].
    pub z: M,
    /// beta of every value head, then alpha: [2·value_heads, hidden].
    pub beta_alpha: M,
    /// Convolution: [channels][taps], the last tap meets the current token.
    pub conv: V,
    /// Bias of the time step: [value_heads].
    pub dt_bias: V,
    /// −exp(A_log): [value_heads].
    pub a: V,
    /// Norm of each head's output, shared by all heads: [head_dim].
    pub norm: V,
    /// Output projection: [hidden, value].
    pub out: M,
}

/// Weights of an attention mixer.
#[derive(Clone, Debug)]
pub struct AttentionWeights<M, V> {
    /// Queries of every head: [heads · head_dim, hidden].
    pub query: M,
    /// Gates of every head: [heads · head_dim, hidden].
    pub gate: M,
    /// [kv_heads · head_dim, hidden].
    pub key: M,
    /// [kv_heads · head_dim, hidden].
    pub value: M,
    /// Norm of each query: [head_dim].
    pub query_norm: V,
    /// Norm of each key: [head_dim].
    pub key_norm: V,
    /// Output projection: [hidden, heads · head_dim].
    pub out: M,
}

/// Router and shared expert of a layer.
#[derive(Clone, Debug)]
pub struct MoeWeights<M, V> {
    /// Norm before router and experts: [hidden].
    pub norm: V,
    /// [experts, hidden].
    pub router: M,
    /// [shared_width, hidden].
    pub shared_gate: M,
    /// [shared_width, hidden].
    pub shared_up: M,
    /// [hidden, shared_width].
    pub shared_down: M,
    /// Its sigmoid says how much of the shared expert a row gets: [hidden].
    pub shared_router: V,
}

/// One of the three matrices of all experts of a layer; expert e's is `stride` bytes behind expert e − 1's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertTensor {
    /// Type of its blocks.
    pub ty: Type,
    /// Outputs of one expert.
    pub rows: usize,
    /// Inputs of one expert.
    pub cols: usize,
    /// Index into [`gguf::Gguf::tensors`].
    pub tensor: usize,
    /// Bytes from the start of the tensor to expert 0's matrix (not 0 in fused tensors).
    pub offset: u64,
    /// Bytes from one expert to the next.
    pub stride: u64,
}

impl ExpertTensor {
    /// Bytes of one expert's matrix.
    pub fn bytes(&self) -> usize {
        self.ty.bytes(self.rows * self.cols).expect("checked when the file was opened")
    }
}

/// Where the routed experts of a layer are in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertLayout {
    /// [width, hidden] each.
    pub gate: ExpertTensor,
    /// [width, hidden] each.
    pub up: ExpertTensor,
    /// [hidden, width] each.
    pub down: ExpertTensor,
}

impl ExpertLayout {
    /// Bytes of one expert: gate + up + down.
    pub fn triplet_bytes(&self) -> usize {
        self.gate.bytes() + self.up.bytes() + self.down.bytes()
    }
}

impl<M, V> Weights<M, V> {
    /// The same weights in other memory: `matrix` and `vector` move one each, in file order of the layers.
    ///
    /// # Errors
    /// The first error of either.
    pub fn map<N, W, E>(
        &self,
        matrix: &mut dyn FnMut(&M) -> Result<N, E>,
        vector: &mut dyn FnMut(&V) -> Result<W, E>,
    ) -> Result<Weights<N, W>, E> {
        let layers = self.layers.iter().map(|layer| layer.map(matrix, vector)).collect::<Result<_, E>>()?;
        Ok(Weights { layers, output_norm: vector(&self.output_norm)?, output: matrix(&self.output)? })
    }
}

impl<M, V> Layer<M, V> {
    fn map<N, W, E>(
        &self,
        m: &mut dyn FnMut(&M) -> Result<N, E>,
        v: &mut dyn FnMut(&V) -> Result<W, E>,
    ) -> Result<Layer<N, W>, E> {
        let mixer = match &self.mixer {
            Mixer::Delta(w) => Mixer::Delta(DeltaWeights {
                qkv: m(&w.qkv)?,
                z: m(&w.z)?,
                beta_alpha: m(&w.beta_alpha)?,
                conv: v(&w.conv)?,
                dt_bias: v(&w.dt_bias)?,
                a: v(&w.a)?,
                norm: v(&w.norm)?,
                out: m(&w.out)?,
            }),
            Mixer::Attention(w) => Mixer::Attention(AttentionWeights {
                query: m(&w.query)?,
                gate: m(&w.gate)?,
                key: m(&w.key)?,
                value: m(&w.value)?,
                query_norm: v(&w.query_norm)?,
                key_norm: v(&w.key_norm)?,
                out: m(&w.out)?,
            }),
        };
        let moe = MoeWeights {
            norm: v(&self.moe.norm)?,
            router: m(&self.moe.router)?,
            shared_gate: m(&self.moe.shared_gate)?,
            shared_up: m(&self.moe.shared_up)?,
            shared_down: m(&self.moe.shared_down)?,
            shared_router: v(&self.moe.shared_router)?,
        };
        Ok(Layer { norm: v(&self.norm)?, mixer, moe })
    }
}
