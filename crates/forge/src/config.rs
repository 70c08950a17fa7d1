//! `config.json` of a Qwen3-Next checkpoint: the shape, and the refusal of what the shape cannot express.

use std::path::{Path, PathBuf};

use gguf::{Metadata, Value as Gguf};
use serde_json::Value;

use crate::checkpoint::read_json;
use crate::error::Error;
use crate::shape::{ARCHITECTURE, Layout, Shape};

/// A parsed configuration.
pub(crate) struct Config {
    path: PathBuf,
    root: Value,
}

/// How positions are scaled beyond the trained context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RopeScaling {
    kind: &'static str,
    factor: f32,
    original_context: Option<u32>,
}

impl Config {
    /// Reads `config.json` in `dir` and refuses models of another family.
    pub(crate) fn open(dir: &Path) -> Result<Config, Error> {
        let path = dir.join("config.json");
        let config = Config { root: read_json(&path)?, path };
        let model_type = config.root.get("model_type").and_then(Value::as_str).unwrap_or_default();
        if model_type != "qwen3_next" {
            let what =
                format!("\"{model_type}\" is not supported: only \"qwen3_next\" checkpoints are converted");
            return Err(config.error("model_type", what));
        }
        config.refuse_unknown_mathematics()?;
        Ok(config)
    }

    /// The id of a special token, a number or the first of a list.
    pub(crate) fn token_id(&self, key: &str) -> Option<u32> {
        let value = self.root.get(key)?;
        let id = value.as_array().map_or(Some(value), |list| list.first())?;
        u32::try_from(id.as_u64()?).ok()
    }

    /// Vocabulary size, which may exceed the number of the tokenizer's tokens.
    pub(crate) fn vocab_size(&self) -> Result<u32, Error> {
        self.number("vocab_size")
    }

    /// The shape of the model.
    pub(crate) fn shape(&self, layout: Layout) -> Result<Shape, Error> {
        let head_dim = self.number("head_dim")?;
        let state_dim = self.number("linear_key_head_dim")?;
        if self.number("linear_value_head_dim")? != state_dim {
            return Err(
                self.error("linear_value_head_dim", "must equal linear_key_head_dim: one size is stored")
            );
        }
        let layers = self.number("num_hidden_layers")?;
        let (attention_interval, attention_layers) = self.attention_layers(layers)?;
        let shape = Shape {
            layers,
            mtp_layers: 0,
            hidden: self.number("hidden_size")?,
            vocab: self.vocab_size()?,
            context: self.number("max_position_embeddings")?,
            heads: self.number("num_attention_heads")?,
            kv_heads: self.number("num_key_value_heads")?,
            head_dim,
            rope_dims: (f64::from(head_dim) * self.rope_number("partial_rotary_factor")?.unwrap_or(0.25))
                as u32,
            rope_base: self
                .rope_number("rope_theta")?
                .ok_or_else(|| self.error("rope_theta", "is missing"))? as f32,
            attention_interval,
            attention_layers,
            key_heads: self.number("linear_num_key_heads")?,
            value_heads: self.number("linear_num_value_heads")?,
            state_dim,
            conv_taps: self.number("linear_conv_kernel_dim")?,
            experts: self.number("num_experts")?,
            experts_used: self.number("num_experts_per_tok")?,
            expert_width: self.number("moe_intermediate_size")?,
            shared_width: self.number("shared_expert_intermediate_size")?,
            eps: self.float(&self.root, "rms_norm_eps")?.unwrap_or(1e-6) as f32,
            tied: self.flag("tie_word_embeddings", false)?,
            layout,
        };
        shape.check()?;
        Ok(shape)
    }

    /// Writes the scaling of positions, if the configuration has one.
    pub(crate) fn describe_rope_scaling(&self, metadata: &mut Metadata) -> Result<(), Error> {
        let Some(scaling) = self.rope_scaling()? else { return Ok(()) };
        let mut set =
            |key: &str, value: Gguf| metadata.set(format!("{ARCHITECTURE}.rope.scaling.{key}"), value);
        set("type", Gguf::String(scaling.kind.to_owned()));
        set("factor", Gguf::F32(scaling.factor));
        if let Some(context) = scaling.original_context {
            set("original_context_length", Gguf::U32(context));
        }
        Ok(())
    }

    /// The interval, or the explicit list where `layer_types` follows none.
    fn attention_layers(&self, layers: u32) -> Result<(u32, Option<Vec<bool>>), Error> {
        let interval = match self.root.get("full_attention_interval") {
            None | Some(Value::Null) => 4,
            Some(_) => self.number("full_attention_interval")?.max(1),
        };
        let Some(Value::Array(types)) = self.root.get("layer_types") else { return Ok((interval, None)) };
        let is_attention =
            |kind: &Value| match kind.as_str() {
                Some("full_attention") => Ok(true),
                Some("linear_attention") => Ok(false),
                _ => Err(self
                    .error("layer_types", format!("{kind} is neither full_attention nor linear_attention"))),
            };
        let list = types.iter().map(is_attention).collect::<Result<Vec<_>, _>>()?;
        if list.len() != layers as usize {
            let what = format!("has {} entries for {layers} layers", list.len());
            return Err(self.error("layer_types", what));
        }
        let follows = (1..).zip(&list).all(|(layer, &kind): (u32, _)| kind == layer.is_multiple_of(interval));
        Ok((interval, (!follows).then_some(list)))
    }

    fn rope_scaling(&self) -> Result<Option<RopeScaling>, Error> {
        let Some((key, value)) = self.rope_table() else { return Ok(None) };
        let kind = value.get("rope_type").or_else(|| value.get("type")).and_then(Value::as_str);
        let kind = match kind {
            None | Some("default") => return Ok(None),
            Some("linear") => "linear",
            Some("yarn") => "yarn",
            Some(other) => {
                return Err(self.error(key, format!("\"{other}\" scaling has no counterpart in GGUF")));
            }
        };
        let known = [
            "rope_type",
            "type",
            "factor",
            "original_max_position_embeddings",
            "rope_theta",
            "partial_rotary_factor",
        ];
        let unknown =
            value.as_object().into_iter().flatten().find(|(name, _)| !known.contains(&name.as_str()));
        if let Some((name, _)) = unknown {
            return Err(self.error(key, format!("its parameter {name} cannot be written to GGUF")));
        }
        let factor = self.float(value, "factor")?.ok_or_else(|| self.error(key, "has no factor"))? as f32;
        let original = value.get("original_max_position_embeddings").and_then(Value::as_u64);
        Ok(Some(RopeScaling { kind, factor, original_context: original.and_then(|n| u32::try_from(n).ok()) }))
    }

    /// The object with rope settings: `rope_parameters` of Transformers 5, `rope_scaling` before.
    fn rope_table(&self) -> Option<(&'static str, &Value)> {
        let keys = ["rope_parameters", "rope_scaling"];
        keys.into_iter()
            .find_map(|key| self.root.get(key).filter(|value| value.is_object()).map(|value| (key, value)))
    }

    /// A rope setting, from the top level or from `rope_parameters`.
    fn rope_number(&self, key: &str) -> Result<Option<f64>, Error> {
        match self.float(&self.root, key)? {
            Some(number) => Ok(Some(number)),
            None => self.rope_table().map_or(Ok(None), |(_, table)| self.float(table, key)),
        }
    }

    /// What would change the result and has no place in the file is an error, not a surprise.
    fn refuse_unknown_mathematics(&self) -> Result<(), Error> {
        let activation = self.root.get("hidden_act").and_then(Value::as_str).unwrap_or("silu");
        if activation != "silu" {
            return Err(self.error("hidden_act", format!("\"{activation}\" is not supported, only \"silu\"")));
        }
        if self.flag("attention_bias", false)? {
            return Err(self.error("attention_bias", "projections with a bias are not supported"));
        }
        if !self.flag("norm_topk_prob", true)? {
            return Err(self.error("norm_topk_prob", "routing without renormalised weights is not supported"));
        }
        if self.root.get("decoder_sparse_step").is_some_and(|step| step.as_u64() != Some(1)) {
            return Err(self.error("decoder_sparse_step", "layers without experts are not supported"));
        }
        if self.root.get("mlp_only_layers").and_then(Value::as_array).is_some_and(|list| !list.is_empty()) {
            return Err(self.error("mlp_only_layers", "layers without experts are not supported"));
        }
        if self.root.get("quantization_config").is_some_and(Value::is_object) {
            return Err(
                self.error("quantization_config", "convert the unquantised (BF16) checkpoint instead")
            );
        }
        Ok(())
    }

    fn number(&self, key: &str) -> Result<u32, Error> {
        match self.root.get(key) {
            None => Err(self.error(key, "is missing")),
            Some(value) => value
                .as_u64()
                .and_then(|number| u32::try_from(number).ok())
                .ok_or_else(|| self.error(key, format!("is {value}, not a whole number of at most 32 bits"))),
        }
    }

    fn float(&self, table: &Value, key: &str) -> Result<Option<f64>, Error> {
        match table.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
                number.map(Some).ok_or_else(|| self.error(key, format!("is {value}, not a positive number")))
            }
        }
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, Error> {
        match self.root.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(value) => {
                value.as_bool().ok_or_else(|| self.error(key, format!("is {value}, not true or false")))
            }
        }
    }

    fn error(&self, key: &str, what: impl Into<String>) -> Error {
        Error::Config { path: self.path.clone(), key: key.to_owned(), what: what.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tiny() -> Value {
        json!({
            "model_type": "qwen3_next", "hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 300,
            "max_position_embeddings": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "num_experts": 3, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "partial_rotary_factor": 0.25
        })
    }

    fn shape_of(root: Value) -> Result<Shape, Error> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), root.to_string()).unwrap();
        Config::open(dir.path())?.shape(Layout::Split)
    }

    fn with(key: &str, value: Value) -> Value {
        let mut root = tiny();
        root[key] = value;
        root
    }

    #[test]
    fn what_the_file_cannot_express_is_refused_by_key() {
        let cases = [
            ("model_type", json!("llama")),
            ("hidden_act", json!("gelu")),
            ("attention_bias", json!(true)),
            ("norm_topk_prob", json!(false)),
            ("decoder_sparse_step", json!(2)),
            ("mlp_only_layers", json!([0])),
            ("quantization_config", json!({"quant_method": "fp8"})),
            ("linear_value_head_dim", json!(16)),
            ("hidden_size", json!("wide")),
            ("hidden_size", json!(-1)),
            ("num_hidden_layers", json!(null)),
            ("rms_norm_eps", json!(-1.0)),
            ("layer_types", json!(["full_attention"])),
            ("layer_types", json!(["full_attention", "mamba", "full_attention", "full_attention"])),
        ];
        assert!(shape_of(tiny()).is_ok());
        for (key, value) in cases {
            let error = shape_of(with(key, value.clone())).err().unwrap_or_else(|| panic!("{key}: {value}"));
            assert!(error.to_string().contains(key), "{key}: {error}");
        }
    }

    #[test]
    fn sizes_that_make_no_model_are_refused() {
        for (key, value) in [("num_experts", 0), ("num_experts_per_tok", 4), ("linear_num_value_heads", 3)] {
            assert!(matches!(shape_of(with(key, json!(value))), Err(Error::Option { .. })), "{key}");
        }
    }

    #[test]
    fn layer_types_become_an_interval_where_they_follow_one() {
        let names =
            |flags: [u8; 4]| json!(flags.map(|f| if f == 1 { "full_attention" } else { "linear_attention" }));
        assert_eq!(shape_of(with("layer_types", names([0, 0, 0, 1]))).unwrap().attention_layers, None);
        let list = shape_of(with("layer_types", names([1, 0, 0, 1]))).unwrap().attention_layers;
        assert_eq!(list, Some(vec![true, false, false, true]));
    }

    #[test]
    fn rope_settings_are_found_in_both_places() {
        let mut root = tiny();
        root.as_object_mut().unwrap().remove("rope_theta");
        root.as_object_mut().unwrap().remove("partial_rotary_factor");
        root["rope_parameters"] =
            json!({"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5});
        let shape = shape_of(root).unwrap();
        assert_eq!((shape.rope_base, shape.rope_dims), (5e6, 8));
    }

    #[test]
    fn rope_scaling_is_written_or_refused() {
        let scaling = |value: Value| {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("config.json"), with("rope_scaling", value).to_string()).unwrap();
            let mut metadata = Metadata::new();
            Config::open(dir.path()).unwrap().describe_rope_scaling(&mut metadata).map(|()| metadata)
        };
        let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
        let metadata = scaling(yarn).unwrap();
        assert_eq!(metadata.str("qwen3next.rope.scaling.type").unwrap(), Some("yarn"));
        assert_eq!(metadata.f32("qwen3next.rope.scaling.factor").unwrap(), Some(4.0));
        assert_eq!(metadata.u32("qwen3next.rope.scaling.original_context_length").unwrap(), Some(32));
        assert!(scaling(json!(null)).unwrap().is_empty());
        for refused in
            [json!({"type": "longrope", "factor": 4.0}), json!({"type": "yarn", "factor": 4, "mscale": 1})]
        {
            assert!(matches!(scaling(refused), Err(Error::Config { .. })));
        }
    }
}
