//! `quantize`: llama.cpp's own quantiser with one type per class of tensors.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr;

use llama_cpp_sys_2 as sys;

use crate::default_threads;
use crate::error::Error;
use crate::gguf::{self, Tensor};
use crate::llama;
use crate::output::Partial;
use crate::types::WeightType;

/// Quantise a GGUF file with llama.cpp, choosing the type of each class of tensors.
///
/// Norms, biases, the router, convolutions and other one-dimensional tensors keep their type.
/// Types that need an importance matrix get a uniform one: the files are for tests of formats
/// and kernels, not for quality.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// GGUF file to read, not split
    input: PathBuf,
    /// GGUF file to write
    #[arg(value_name = "OUTPUT")]
    destination: PathBuf,
    /// Type of the routed experts (*_exps)
    #[arg(long, value_name = "TYPE", ignore_case = true)]
    experts: WeightType,
    /// Type of all other matrices
    #[arg(long, value_name = "TYPE", ignore_case = true)]
    dense: WeightType,
    /// Type of the output head [default: as --dense]
    #[arg(long, value_name = "TYPE", ignore_case = true)]
    output: Option<WeightType>,
    /// Type of the token embedding [default: as --dense]
    #[arg(long, value_name = "TYPE", ignore_case = true)]
    embed: Option<WeightType>,
    /// Type of tensors whose name contains TEXT; the first match wins over the classes. Repeatable:
    /// --tensor blk.7.ffn_down_exps=IQ2_XS
    #[arg(long, value_name = "TEXT=TYPE", value_parser = rule)]
    tensor: Vec<Rule>,
    /// Accept tensors that are quantised already
    #[arg(long)]
    requantize: bool,
    /// CPU threads [default: all]
    #[arg(long, value_name = "N", value_parser = crate::positive)]
    threads: Option<usize>,
}

/// A type for tensors by a part of their name.
#[derive(Clone, Debug)]
struct Rule {
    text: String,
    ty: WeightType,
}

fn rule(text: &str) -> Result<Rule, String> {
    let (part, name) = text.split_once('=').ok_or("TEXT=TYPE is expected")?;
    if part.is_empty() {
        return Err("the text before = is empty".to_string());
    }
    Ok(Rule { text: part.to_string(), ty: WeightType::parse(name)? })
}

impl Args {
    /// The type asked for a tensor, `None` for those that keep theirs.
    fn wanted(&self, tensor: &Tensor) -> Option<WeightType> {
        if !converted(tensor) {
            return None;
        }
        if let Some(rule) = self.tensor.iter().find(|rule| tensor.name.contains(&rule.text)) {
            return Some(rule.ty);
        }
        Some(match tensor.name.as_str() {
            "token_embd.weight" => self.embed.unwrap_or(self.dense),
            "output.weight" => self.output.unwrap_or(self.dense),
            name if name.contains("_exps.") => self.experts,
            _ => self.dense,
        })
    }
}

/// Does llama.cpp's quantiser touch this tensor of a `qwen3next` file at all?
fn converted(tensor: &Tensor) -> bool {
    let kept = ["_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight"];
    tensor.matrix && tensor.name.ends_with(".weight") && !kept.iter().any(|end| tensor.name.ends_with(end))
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), Error> {
    let fail = |detail: String| Error::Quantize { path: args.input.clone(), detail };
    let tensors = gguf::tensors(&args.input)?;
    let plan: Vec<(&Tensor, WeightType)> =
        tensors.iter().filter_map(|tensor| Some((tensor, args.wanted(tensor)?))).collect();
    for (tensor, ty) in &plan {
        let block = ty.block();
        if tensor.columns % block != 0 {
            return Err(fail(format!(
                "{}: rows of {} are not a multiple of {}'s blocks of {block}; give it another type with --tensor",
                tensor.name,
                tensor.columns,
                ty.name(),
            )));
        }
    }
    let partial = Partial::new(&args.destination);
    // The library would only say "iostream error".
    fs::File::create(partial.path())
        .map_err(|source| Error::Write { path: args.destination.clone(), source })?;
    convert(args, &plan, partial.path())?;
    let written = gguf::tensors(partial.path())?;
    verify(&plan, &written).map_err(fail)?;
    partial.keep()?;
    summarize(&args.destination, &written)
}

/// Calls the library with an exact name pattern for every tensor of the plan.
fn convert(args: &Args, plan: &[(&Tensor, WeightType)], to: &Path) -> Result<(), Error> {
    let fail = |detail: String| Error::Quantize { path: args.input.clone(), detail };
    let from = llama::c_path(&args.input)?;
    let to = llama::c_path(to)?;
    let c_string =
        |text: String| CString::new(text).map_err(|_| fail("a tensor name contains NUL".to_string()));
    let names: Vec<CString> =
        plan.iter().map(|(tensor, _)| c_string(tensor.name.clone())).collect::<Result<_, _>>()?;
    let patterns: Vec<CString> = plan
        .iter()
        .map(|(tensor, _)| c_string(format!("^{}$", tensor.name.replace('.', "\\."))))
        .collect::<Result<_, _>>()?;
    let mut overrides: Vec<sys::llama_model_tensor_override> = patterns
        .iter()
        .zip(plan)
        .map(|(pattern, (_, ty))| sys::llama_model_tensor_override {
            pattern: pattern.as_ptr(),
            type_: ty.ggml(),
        })
        .collect();
    overrides.push(sys::llama_model_tensor_override { pattern: ptr::null(), type_: sys::GGML_TYPE_COUNT });

    // One weight per column and expert; all tensors can share the same ones.
    let weighted = || plan.iter().zip(&names).filter(|((_, ty), _)| ty.needs_importance());
    let ones =
        vec![1.0f32; weighted().map(|((tensor, _), _)| tensor.columns * tensor.experts).max().unwrap_or(0)];
    let mut importance: Vec<sys::llama_model_imatrix_data> = weighted()
        .map(|((tensor, _), name)| sys::llama_model_imatrix_data {
            name: name.as_ptr(),
            data: ones.as_ptr(),
            size: tensor.columns * tensor.experts,
        })
        .collect();
    let any = !importance.is_empty();
    importance.push(sys::llama_model_imatrix_data { name: ptr::null(), data: ptr::null(), size: 0 });

    // Overrides of this table win over name patterns inside the library.
    let special = |name: &str| plan.iter().find(|(tensor, _)| tensor.name == name).map(|(_, ty)| ty.ggml());
    // SAFETY: every pointer outlives the call, both lists end with a null entry, and each importance
    // entry is as long as it says.
    let status = unsafe {
        let mut params = sys::llama_model_quantize_default_params();
        params.nthread = i32::try_from(args.threads.unwrap_or_else(default_threads)).unwrap_or(i32::MAX);
        params.ftype = file_type(args);
        params.pure_ = true;
        params.allow_requantize = args.requantize;
        params.token_embedding_type = special("token_embd.weight").unwrap_or(sys::GGML_TYPE_COUNT);
        params.output_tensor_type = special("output.weight").unwrap_or(sys::GGML_TYPE_COUNT);
        params.tt_overrides = overrides.as_ptr();
        params.imatrix = if any { importance.as_ptr() } else { ptr::null() };
        sys::llama_model_quantize(from.as_ptr(), to.as_ptr(), &params)
    };
    if status == 0 { Ok(()) } else { Err(fail(llama::errors())) }
}

/// The label of the whole file: the experts' type, else the dense one. The library applies
/// overrides only below a quantised label, so two float types leave its default.
fn file_type(args: &Args) -> sys::llama_ftype {
    [args.experts, args.dense].iter().find_map(|ty| ty.file_type()).unwrap_or(sys::LLAMA_FTYPE_MOSTLY_Q8_0)
}

/// Did every tensor get its type? The library replaces types quietly when it sees fit.
fn verify(plan: &[(&Tensor, WeightType)], written: &[Tensor]) -> Result<(), String> {
    let types: BTreeMap<&str, sys::ggml_type> =
        written.iter().map(|tensor| (tensor.name.as_str(), tensor.ty)).collect();
    for (tensor, ty) in plan {
        match types.get(tensor.name.as_str()) {
            Some(&got) if got == ty.ggml() => {}
            Some(&got) => {
                let got = gguf::type_name(got);
                return Err(format!("{}: llama.cpp wrote {got} instead of {}", tensor.name, ty.name()));
            }
            None => return Err(format!("{}: llama.cpp left it out", tensor.name)),
        }
    }
    Ok(())
}

/// Tells on standard error how many tensors have which type, and the file's size.
fn summarize(path: &Path, written: &[Tensor]) -> Result<(), Error> {
    let bytes = fs::metadata(path).map_err(|source| Error::Read { path: path.to_path_buf(), source })?.len();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for tensor in written {
        *counts.entry(gguf::type_name(tensor.ty)).or_default() += 1;
    }
    let counts: Vec<String> = counts.iter().map(|(name, count)| format!("{count} {name}")).collect();
    eprintln!("{}: {:.2} MB, tensors: {}", path.display(), bytes as f64 / 1e6, counts.join(", "));
    Ok(())
}
