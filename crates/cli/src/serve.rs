//! `redlite serve`: a model behind HTTP.

pub mod args;

use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use engine::{Scheduler, SchedulerOptions, SessionOptions, Sessions};
use model::state::PAGE;
use server::{Access, Config, Served, Service};
use text::ChatTemplate;

use crate::failure::{Failure, Outcome};
use crate::{kept, open, report};
use args::ServeArgs;

/// Context of a session unless the user says another.
const CONTEXT: usize = 32_768;

/// Runs the command.
pub fn run(args: &ServeArgs) -> Result<Outcome, Failure> {
    // A port that is taken should not cost the time to load.
    let (listener, address) = listen(args)?;
    let opened = open::model_with_template(&args.model, args.chat_template.as_deref())?;
    let (model, tokenizer) = (opened.model, Arc::new(opened.tokenizer));
    let template = opened.chat_template.map(|source| match ChatTemplate::new(&source, &tokenizer) {
        Ok(template) => Ok((source, template)),
        Err(error) => Err(Failure::Usage(format!("chat template: {error}"))),
    });
    let context = args.backend.context.unwrap_or(CONTEXT.min(model.spec.context));
    let options = SessionOptions {
        budget: args.session_cache.saturating_mul(1 << 20),
        spacing: args.spacing,
        kv: args.backend.kv.into(),
    };
    // Each session may have to copy a page that it shares with a checkpoint.
    let session = (context.div_ceil(PAGE) + 1).saturating_mul(PAGE);
    let states = Sessions::state_positions(&model.spec, &options, args.parallel);
    let kept = Sessions::positions(&model.spec, &options);
    let positions = args.parallel.saturating_mul(session).saturating_add(kept).saturating_add(states);
    let mut started = open::start_with_room(&model, &args.backend, (context, positions), args.quiet)?;
    let mut sessions = Sessions::new(&started.engine, options);
    let template = template.transpose()?;
    if let Some(folder) = &args.state_dir {
        let source = template.as_ref().map(|(source, _)| source.as_str());
        let size = args.state_size.saturating_mul(1 << 20);
        let store = kept::store(&mut started.engine, (folder, size), source, options.kv, args.quiet)?;
        sessions = sessions.with_store(store);
    }
    let scheduling =
        SchedulerOptions { parallel: args.parallel, queue: args.queue, ..SchedulerOptions::default() };
    let scheduler = Scheduler::new(started.engine, sessions, tokenizer.clone(), scheduling);
    let served = Served {
        name: args.name.clone().unwrap_or_else(|| name(&args.model)),
        tokenizer,
        template,
        context,
        trained_context: model.spec.context,
        parallel: args.parallel,
        since: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs()),
    };
    if !args.quiet {
        report::say(format_args!(
            "redlite: serving {} with a context of {context} for {} at once; loaded in {:.2} s [{}]",
            served.name,
            args.parallel,
            started.load.as_secs_f64(),
            started.variant,
        ));
    }
    let key =
        args.api_key.clone().or_else(|| std::env::var("REDLITE_API_KEY").ok()).filter(|key| !key.is_empty());
    if key.is_none() && !address.ip().is_loopback() {
        report::say(format_args!(
            "redlite: warning: everybody who reaches {address} can use this server; set --api-key"
        ));
    }
    let (service, engine) = Service::start(scheduler, served, Config { log: !args.quiet })?;
    writeln!(std::io::stdout(), "http://{address}")?;
    server::serve(listener, service, Access::new(key.as_deref(), args.cors_origin.clone()))?;
    // Whatever is still running has been given up; the engine ends with its next step.
    engine.join().map_err(|_| Failure::Usage("the engine has stopped; this is a bug".to_string()))?;
    Ok(Outcome::Success)
}

fn listen(args: &ServeArgs) -> Result<(TcpListener, std::net::SocketAddr), Failure> {
    let wanted = (args.host.as_str(), args.port);
    let fail = |error| Failure::Usage(format!("cannot listen on {}:{}: {error}", args.host, args.port));
    let listener = TcpListener::bind(wanted).map_err(fail)?;
    let address = listener.local_addr().map_err(fail)?;
    Ok((listener, address))
}

/// The file's name without its ending and shard number, or the folder's.
fn name(path: &Path) -> String {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let name = whole.file_stem().filter(|_| whole.is_file()).or(whole.file_name());
    let name = name.map_or_else(|| "model".to_string(), |name| name.to_string_lossy().into_owned());
    match name.rsplit_once("-of-") {
        Some((shard, _)) => shard.rsplit_once('-').map_or(shard, |(name, _)| name).to_string(),
        None => name,
    }
}
