//! From a path to an engine.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::plan::Plan;
use engine::{Engine, Options};
use experts::Monitor;
use model::{Backend, Limits, Model, ResidentWeights};
use text::Tokenizer;

use crate::args::{BackendArgs, BackendName};
use crate::cache::Room;
use crate::failure::Failure;
use crate::report::{self, Bar};
use crate::{cache, gpu, prompt};

/// A model and its tokenizer.
pub struct Opened {
    /// The model.
    pub model: Arc<Model>,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its chat template, if it has one.
    pub chat_template: Option<String>,
}

/// Opens a model file and its tokenizer, and prints what is odd about the file.
pub fn model(path: &Path) -> Result<Opened, Failure> {
    let fail = |source| Failure::Model { path: path.to_path_buf(), source };
    let model = Model::open(path).map_err(fail)?;
    for warning in &model.warnings {
        report::say(format_args!("redlite: warning: {}: {warning}", path.display()));
    }
    let (tokenizer, chat_template) = tokenizer(path, &model)?;
    Ok(Opened { model: Arc::new(model), tokenizer, chat_template })
}

/// As [`model`], with the chat template of a file instead of the model's own.
pub fn model_with_template(path: &Path, template: Option<&Path>) -> Result<Opened, Failure> {
    let own = template.map(prompt::read).transpose()?;
    let mut opened = model(path)?;
    opened.chat_template = own.or(opened.chat_template);
    Ok(opened)
}

/// The tokenizer of a model file, and its chat template.
fn tokenizer(path: &Path, model: &Model) -> Result<(Tokenizer, Option<String>), Failure> {
    let fail = |source| Failure::Model { path: path.to_path_buf(), source };
    let mut vocabulary = model::vocabulary(model.gguf.metadata()).map_err(fail)?;
    let tokens = vocabulary.tokens.len();
    let chat_template = vocabulary.chat_template.take();
    let tokenizer = Tokenizer::new(vocabulary).map_err(|error| fail(error.into()))?;
    if tokens > model.spec.vocab {
        return Err(fail(model::Error::BadKey {
            key: "tokenizer.ggml.tokens".to_string(),
            found: format!("{tokens} tokens"),
            expected: format!("at most the {} rows of the token embedding", model.spec.vocab),
        }));
    }
    Ok((tokenizer, chat_template))
}

/// An engine and how long its weights took to load.
pub struct Started {
    /// The engine.
    pub engine: Engine,
    /// Time to load.
    pub load: Duration,
    /// Kernels chosen for this machine.
    pub variant: String,
    /// A view of the cache of experts, if there is one.
    pub monitor: Option<Monitor>,
    /// What it was planned to be.
    pub plan: Plan,
}

/// Loads `model` on the backend the arguments name, with room for `context` positions.
pub fn start(
    model: &Arc<Model>,
    args: &BackendArgs,
    context: usize,
    quiet: bool,
) -> Result<Started, Failure> {
    let room = Room { context, positions: context, prompt: None, lasting: false };
    start_for(model, args, room, quiet)
}

/// As [`start`], for many prompts to come, in sessions of at most `context` positions and room for `positions` over
/// all of them.
pub fn start_with_room(
    model: &Arc<Model>,
    args: &BackendArgs,
    (context, positions): (usize, usize),
    quiet: bool,
) -> Result<Started, Failure> {
    start_for(model, args, Room { context, positions, prompt: None, lasting: true }, quiet)
}

/// As [`start`], for what is known to come.
pub fn start_for(
    model: &Arc<Model>,
    args: &BackendArgs,
    room: Room,
    quiet: bool,
) -> Result<Started, Failure> {
    let (began, context) = (Instant::now(), room.context);
    let trained = model.spec.context;
    if context > trained {
        return Err(Failure::Usage(format!(
            "a context of {context} is more than the {trained} of the model"
        )));
    }
    let planned = cache::plan(model, args, &room, cache::spare(&args.cache))?;
    if !quiet {
        report::say(cache::line(&planned.plan, args.backend));
    }
    let (mut backend, fetched) = match args.backend {
        BackendName::Cuda => gpu::start(model, args, &planned, quiet)?,
        name => (backend(model, name, cache::cpu_options(args), planned.plan.limits, quiet)?, None),
    };
    let mut variant = backend.capabilities().variant.clone();
    if planned.gpus.len() > 1 {
        variant += &format!(" x {}", planned.gpus.len());
    }
    let (experts, monitor) = cache::source(model, &mut *backend, (&args.cache, &planned), fetched)?;
    let options = Options { chunk: planned.plan.chunk, context };
    let engine = Engine::new(model.clone(), backend, experts, options).flowing(planned.flow);
    Ok(Started { engine, load: began.elapsed(), variant, monitor, plan: planned.plan })
}

/// A backend by name; `options` are those of the CPU.
pub fn backend(
    model: &Arc<Model>,
    name: BackendName,
    options: cpu::Options,
    limits: Limits,
    quiet: bool,
) -> Result<Box<dyn Backend>, Failure> {
    let rounding = match name {
        BackendName::Cpu => {
            let weights = load(model, quiet)?;
            return Ok(Box::new(cpu::Cpu::new(model.clone(), weights, limits, options)?));
        }
        BackendName::Cuda => {
            let weights = load(model, quiet)?;
            return Ok(Box::new(cuda::Cuda::new(model.clone(), &weights, limits, cuda::Options::default())?));
        }
        BackendName::Reference => reference::Rounding::None,
        BackendName::ReferenceLlama => reference::Rounding::LlamaCpp,
    };
    let options = reference::Options { rounding, ..reference::Options::default() };
    Ok(Box::new(reference::Reference::new(model.clone(), limits, options)?))
}

pub fn load(model: &Model, quiet: bool) -> Result<ResidentWeights, Failure> {
    let bar = Bar::bytes("loading", model.dense_bytes(), quiet);
    let weights = model.load(&mut |done, _| bar.set(done));
    bar.finish();
    Ok(weights?)
}

/// Refuses to write to a file the model is read from.
pub fn refuse_input(output: &Path, gguf: &gguf::Gguf) -> Result<(), Failure> {
    let Ok(output_path) = output.canonicalize() else { return Ok(()) };
    let same = |shard: &gguf::Shard| shard.path().canonicalize().is_ok_and(|path| path == output_path);
    if gguf.shards().iter().any(same) {
        return Err(Failure::Usage(format!(
            "{}: is the model itself; choose another file",
            output.display()
        )));
    }
    Ok(())
}
