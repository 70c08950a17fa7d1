//! One turn: read what is new, write the answer.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use engine::{
    Cancel, Engine, Finish, Generation, GenerationOptions, Request, Reuse, Session, SessionOptions, Sessions,
};
use model::state::{PAGE, SnapshotShape};
use model::{GRID, Spec};
use serde_json::{Map, Value as Json};
use text::{AnswerParser, ChatTemplate, Piece, Tokenizer};

use super::args::ChatArgs;
use crate::failure::Failure;
use crate::report::{self, Bar};
use crate::{kept, open};

/// Context unless the user says another.
const CONTEXT: usize = 32_768;
/// Tokens between two checkpoints inside a long prompt.
const SPACING: usize = 2048;
/// States that are kept beside a whole context of keys and values.
const STATES: u64 = 6;

/// A model that answers.
pub struct Talk {
    engine: Engine,
    sessions: Sessions,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    variables: Map<String, Json>,
    options: GenerationOptions,
    quiet: bool,
    /// Reasoning is dim where somebody watches.
    dim: bool,
    last: Option<Turn>,
    turns: usize,
    /// Tokens read, reused, written in all turns.
    total: [usize; 3],
}

/// What a turn took.
struct Turn {
    reuse: Reuse,
    reading: Duration,
    written: usize,
    writing: Duration,
    end: &'static str,
    session: usize,
}

/// What the model said.
#[derive(Debug, Default)]
pub struct Answer {
    /// For the user.
    pub content: String,
    /// Thought before.
    pub reasoning: String,
}

/// How a turn ended.
#[derive(Debug)]
pub enum Said {
    /// With an answer, or the beginning of one.
    Answer(Answer),
    /// Before the message was read.
    Unread,
}

impl Talk {
    /// Opens the model and makes room for its conversations.
    ///
    /// # Errors
    /// Those of the model, its template and the backend.
    pub fn new(args: &ChatArgs) -> Result<Talk, Failure> {
        let options = GenerationOptions {
            sampling: (&args.sampling).into(),
            max_tokens: args.max_tokens,
            ..GenerationOptions::default()
        };
        options.sampling.check()?;
        let opened = open::model_with_template(&args.model, args.chat_template.as_deref())?;
        let source = opened.chat_template.ok_or_else(|| {
            Failure::Usage("the model has no chat template; `redlite run --raw` continues texts".to_string())
        })?;
        let template = ChatTemplate::new(&source, &opened.tokenizer)
            .map_err(|error| Failure::Usage(format!("chat template: {error}")))?;
        let spec = &opened.model.spec;
        let context = args.backend.context.unwrap_or(CONTEXT.min(spec.context));
        let sessions = session_options(spec, args, context);
        let states = Sessions::state_positions(spec, &sessions, 1);
        let room = Sessions::positions(spec, &sessions).saturating_add(states);
        let positions = context.saturating_add(2 * PAGE).saturating_add(room);
        let mut started =
            open::start_with_room(&opened.model, &args.backend, (context, positions), args.quiet)?;
        let mut kept = Sessions::new(&started.engine, sessions);
        if let Some(folder) = &args.state_dir {
            let size = args.state_size.saturating_mul(1 << 20);
            let store =
                kept::store(&mut started.engine, (folder, size), Some(&source), sessions.kv, args.quiet)?;
            kept = kept.with_store(store);
        }
        let mut variables = Map::new();
        if args.no_think {
            variables.insert("enable_thinking".to_string(), Json::Bool(false));
        }
        Ok(Talk {
            engine: started.engine,
            sessions: kept,
            tokenizer: opened.tokenizer,
            template,
            variables,
            options,
            quiet: args.quiet,
            dim: std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none(),
            last: None,
            turns: 0,
            total: [0; 3],
        })
    }

    /// Answers the last of `messages`, on standard output.
    ///
    /// # Errors
    /// Those of the template, the engine and the output. Being cancelled is none.
    pub fn answer(&mut self, messages: &[Json], cancel: &Cancel) -> Result<Said, Failure> {
        let rendered = self
            .template
            .render(&Json::from(messages), None, true, &self.variables)
            .map_err(|error| Failure::Usage(error.to_string()))?;
        let tokens = self.tokenizer.encode_rendered(&rendered);
        let context = self.engine.options().context;
        if tokens.len() >= context {
            return Err(Failure::Usage(format!(
                "the conversation has {} tokens, more than the context of {context}; /reset starts over, \
                 --context makes more room",
                tokens.len()
            )));
        }
        let thinking = rendered.text().trim_end().ends_with("<think>");
        let (mut session, reuse) = self.sessions.open(&mut self.engine, &tokens)?;
        let began = Instant::now();
        let read = self.read(&mut session, &tokens, cancel);
        let reading = began.elapsed();
        let said = match read {
            Ok(logits) => self.write(&mut session, logits, thinking, cancel).map(|(answer, mut turn)| {
                (turn.reuse, turn.reading, turn.session) = (reuse, reading, session.len());
                let sums = [reuse.read, reuse.reused, turn.written];
                self.total.iter_mut().zip(sums).for_each(|(total, more)| *total += more);
                self.turns += 1;
                self.last = Some(turn);
                Said::Answer(answer)
            }),
            Err(engine::Error::Cancelled { .. }) => Ok(Said::Unread),
            Err(error) => Err(error.into()),
        };
        // What has been read stays, however the turn ended.
        if matches!(said, Ok(Said::Answer(_))) {
            self.sessions.save(&mut self.engine, &session)?;
        }
        self.sessions.keep(&mut self.engine, session);
        said
    }

    /// Reads what the session lacks of `tokens`.
    fn read(&mut self, session: &mut Session, tokens: &[u32], cancel: &Cancel) -> engine::Result<Vec<f32>> {
        let from = session.len();
        let ends = self.tokenizer.stop_tokens();
        let boundaries: Vec<usize> =
            (1..).zip(tokens).filter(|(_, id)| ends.contains(id)).map(|(at, _)| at).collect();
        let new = tokens.len() - from;
        let bar = Bar::tokens("reading", new, self.quiet || new < GRID);
        let mut made = Vec::new();
        let mut take = |checkpoint| made.push(checkpoint);
        let mut progress = |done: f64, _| bar.set(done as u64);
        let planned = self.sessions.plan(from, tokens.len(), &boundaries);
        let mut request = Request {
            checkpoints: planned.iter().map(|at| at - from).collect(),
            on_checkpoint: Some(&mut take),
            on_progress: Some(&mut progress),
            cancel: cancel.clone(),
            ..Request::default()
        };
        let read = self.engine.ingest(session, &tokens[from..], &mut request);
        bar.finish();
        made.into_iter().for_each(|checkpoint| self.sessions.keep(&mut self.engine, checkpoint));
        Ok(read?.logits)
    }

    /// Writes the answer as it comes. The turn lacks what reading took.
    fn write(
        &mut self,
        session: &mut Session,
        logits: Vec<f32>,
        thinking: bool,
        cancel: &Cancel,
    ) -> Result<(Answer, Turn), Failure> {
        let mut generation = Generation::new(&self.tokenizer, logits, &self.options)?;
        let mut parser = AnswerParser::new(None, None, thinking);
        let (began, mut answer, mut written, mut end) = (Instant::now(), Answer::default(), 0, "length");
        loop {
            let (text, last) = match generation.next(&mut self.engine, session, &self.tokenizer, cancel) {
                Ok(Some(token)) => {
                    written += 1;
                    end = token.finish.map_or(end, name);
                    (token.text, token.finish.is_some())
                }
                Ok(None) => (String::new(), true),
                Err(engine::Error::Cancelled { .. }) => {
                    end = "interrupted";
                    (generation.rest(), true)
                }
                Err(error) => return Err(error.into()),
            };
            let mut pieces = parser.push(&text);
            if last {
                pieces.extend(parser.finish());
            }
            for piece in pieces {
                self.show(&piece)?;
                match piece {
                    Piece::Content(text) => answer.content += &text,
                    Piece::Reasoning(text) => answer.reasoning += &text,
                    Piece::Call(_) | Piece::Arguments(_) => {}
                }
            }
            if last {
                break;
            }
        }
        let mut out = std::io::stdout().lock();
        writeln!(out)?;
        out.flush()?;
        let reuse = Reuse { reused: 0, read: 0, known: 0, miss: engine::Miss::New };
        let (reading, writing) = (Duration::ZERO, began.elapsed());
        Ok((answer, Turn { reuse, reading, written, writing, end, session: 0 }))
    }

    fn show(&self, piece: &Piece) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        match piece {
            Piece::Reasoning(text) if self.dim => write!(out, "\x1b[2m{text}\x1b[0m")?,
            Piece::Reasoning(text) | Piece::Content(text) => out.write_all(text.as_bytes())?,
            // No notation of calls is told to the parser: none come.
            Piece::Call(_) | Piece::Arguments(_) => {}
        }
        out.flush()
    }

    /// What the last turn took, and all of them.
    pub fn stats(&self) -> String {
        let Some(turn) = &self.last else { return "nothing has been asked yet".to_string() };
        let [read, reused, written] = self.total;
        let kept = self.sessions.stats();
        format!(
            "{}\nread at {:.1} tok/s, wrote {} tokens at {:.1} tok/s ({})\nin {} turns: read {read}, reused {reused}, \
             wrote {written}; the session holds {} of {} tokens\n{} checkpoints, {}",
            turn.reuse,
            report::rate(turn.reuse.read, turn.reading),
            turn.written,
            report::rate(turn.written, turn.writing),
            turn.end,
            self.turns,
            turn.session,
            self.engine.options().context,
            kept.checkpoints,
            report::size(kept.bytes),
        )
    }

    /// Why the last answer ended, where that is not the model's own end.
    pub fn cut(&self) -> Option<&'static str> {
        match self.last.as_ref()?.end {
            "interrupted" => Some("stopped; what was written is part of the conversation"),
            "length" => Some("stopped after the most tokens of an answer (-n)"),
            "context" => Some("the context is full; /reset starts over"),
            _ => None,
        }
    }
}

fn name(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop | Finish::StopText(_) => "stop",
        Finish::Length => "length",
        Finish::Context => "context",
    }
}

/// The memory for checkpoints: what the user says, or a whole conversation and the states inside it.
fn session_options(spec: &Spec, args: &ChatArgs, context: usize) -> SessionOptions {
    let kv = args.backend.kv.into();
    let shape = SnapshotShape::new(spec, kv);
    let context = context.next_multiple_of(PAGE).saturating_mul(shape.position_len() * kv.bytes());
    let ample = (context as u64).saturating_add(STATES * 4 * shape.slot_len() as u64);
    let budget = args.session_cache.map_or(ample, |mib| mib.saturating_mul(1 << 20));
    SessionOptions { budget, spacing: SPACING, kv }
}
