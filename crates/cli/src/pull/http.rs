//! Requests: redirects, the token and where it goes, trying again.

use std::io::Read;
use std::time::{Duration, Instant};

use engine::Cancel;
use ureq::Agent;
use ureq::http::{HeaderMap, Uri};

use super::error::Error;

/// Most redirects of one request.
const REDIRECTS: usize = 10;
/// Longest wait for a connection or the head of an answer, and between two bytes.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest wait that a server can ask for.
const LONGEST: Duration = Duration::from_secs(300);
/// Most bytes of an answer that is read whole.
const WHOLE: u64 = 64 << 20;

/// Who answers: scheme, host, port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin(String, String, u16);

impl Origin {
    /// That of an address; `None` if it is not http or https.
    pub fn of(url: &str) -> Option<Origin> {
        let uri: Uri = url.parse().ok()?;
        let scheme = uri.scheme_str()?.to_ascii_lowercase();
        let port = match scheme.as_str() {
            "https" => 443,
            "http" => 80,
            _ => return None,
        };
        let host = uri.host().filter(|host| !host.is_empty())?.to_ascii_lowercase();
        Some(Origin(scheme, host, uri.port_u16().unwrap_or(port)))
    }

    /// Whether nobody on the way can listen.
    pub fn is_private(&self) -> bool {
        self.0 == "https" || ["127.0.0.1", "[::1]", "localhost"].contains(&self.1.as_str())
    }
}

/// When to try again.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Times to try again when nothing comes.
    pub retries: u32,
    /// Before the first time; doubled before each further one.
    pub delay: Duration,
}

/// Asks servers.
pub struct Client {
    agent: Agent,
    /// Whom the token is for, and the token.
    token: Option<(Origin, String)>,
    cancel: Cancel,
    patience: Patience,
}

/// An answer.
pub struct Reply {
    /// HTTP status: 2xx or 416.
    pub status: u16,
    /// Its head.
    pub headers: HeaderMap,
    /// SHA-256 that a redirect on the way told (`X-Linked-ETag`), as it stands there.
    pub linked: Option<String>,
    /// What follows.
    pub body: Box<dyn Read>,
}

impl Reply {
    /// A header's text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// An agent of our ways.
pub fn agent() -> Agent {
    let config = Agent::config_builder()
        .user_agent(concat!("redlite/", env!("CARGO_PKG_VERSION")))
        .accept_encoding("identity")
        .http_status_as_error(false)
        .max_redirects(0)
        .timeout_connect(Some(PATIENCE))
        .timeout_recv_response(Some(PATIENCE))
        .timeout_per_read(Some(PATIENCE))
        .build();
    config.into()
}

impl Client {
    /// A client that shows `token` to its origin and to nobody else.
    pub fn new(agent: Agent, token: Option<(Origin, String)>, cancel: Cancel, patience: Patience) -> Client {
        Client { agent, token, cancel, patience }
    }

    /// Whether somebody asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Asks for an address, and follows where it leads.
    ///
    /// # Errors
    /// [`Error::Status`] for anything but 2xx and 416, [`Error::Network`], [`Error::Protocol`].
    pub fn get(&self, url: &str, headers: &[(&str, String)]) -> Result<Reply, Error> {
        let (mut at, mut linked) = (url.to_string(), None);
        for _ in 0..=REDIRECTS {
            let reply = self.ask(&at, headers)?;
            let linked_here = reply.header("x-linked-etag").map(str::to_string);
            linked = linked.or(linked_here);
            match reply.status {
                301 | 302 | 303 | 307 | 308 => {
                    let to = reply.header("location").unwrap_or_default().to_string();
                    at = follow(&at, &to).map_err(|reason| Error::Protocol { url: at, reason })?;
                }
                200..=299 | 416 => return Ok(Reply { linked, ..reply }),
                status => {
                    let seconds = reply.header("retry-after").and_then(|text| text.trim().parse().ok());
                    let retry_after = seconds.map(Duration::from_secs);
                    return Err(Error::Status { url: at, status, retry_after });
                }
            }
        }
        Err(Error::Protocol { url: url.to_string(), reason: "too many redirects".to_string() })
    }

    /// One request.
    fn ask(&self, url: &str, headers: &[(&str, String)]) -> Result<Reply, Error> {
        let mut request = self.agent.get(url);
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        if let Some((origin, token)) = &self.token
            && Origin::of(url).as_ref() == Some(origin)
        {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let reply = request.call().map_err(|error| self.network(url, &error))?;
        let (head, body) = reply.into_parts();
        let body = Box::new(body.into_reader());
        Ok(Reply { status: head.status.as_u16(), headers: head.headers, linked: None, body })
    }

    /// What went wrong with a connection.
    pub fn network(&self, url: &str, error: &dyn std::fmt::Display) -> Error {
        match self.cancel.is_cancelled() {
            true => Error::Cancelled,
            false => Error::Network { url: url.to_string(), reason: error.to_string() },
        }
    }

    /// An answer that is read whole, and the address of the next part of a list, if there is one.
    ///
    /// # Errors
    /// As [`Client::get`], after trying again.
    pub fn text(&self, url: &str) -> Result<(String, Option<String>), Error> {
        self.retrying(|| {
            let mut reply = self.get(url, &[])?;
            let next = reply.header("link").and_then(next_of).and_then(|next| follow(url, &next).ok());
            let mut text = String::new();
            let read = reply.body.by_ref().take(WHOLE + 1).read_to_string(&mut text);
            if read.map_err(|error| self.network(url, &error))? as u64 > WHOLE {
                let reason = "it is longer than any list of files".to_string();
                return Err(Error::Protocol { url: url.to_string(), reason });
            }
            Ok((text, next))
        })
    }

    /// Does something until it succeeds, fails for good, or has failed too often.
    fn retrying<T>(&self, mut work: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
        let mut tries = 0;
        loop {
            match work() {
                Err(error) if error.is_transient() => self.pause(&mut tries, error)?,
                done => return done,
            }
        }
    }

    /// Waits before another try, the longer the more there were; gives up with `error` after too many.
    ///
    /// # Errors
    /// `error`, or [`Error::Cancelled`].
    pub fn pause(&self, tries: &mut u32, error: Error) -> Result<(), Error> {
        if *tries >= self.patience.retries {
            return Err(error);
        }
        let own = self.patience.delay.saturating_mul(1 << (*tries).min(16));
        *tries += 1;
        let wait = own.max(error.retry_after()).min(LONGEST);
        let began = Instant::now();
        while !self.cancel.is_cancelled() {
            let left = wait.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(Duration::from_millis(50)));
        }
        Err(Error::Cancelled)
    }
}

/// Where a redirect from `from` leads.
fn follow(from: &str, to: &str) -> Result<String, String> {
    let origin = Origin::of(from).ok_or("no address of http or https")?;
    let root = from.match_indices('/').nth(2).map_or(from, |(at, _)| &from[..at]);
    let path = &from[root.len()..];
    let path = &path[..path.find(['?', '#']).unwrap_or(path.len())];
    let folder = &path[..path.rfind('/').map_or(0, |at| at + 1)];
    let target = match to {
        "" => return Err("a redirect to nowhere".to_string()),
        to if to.contains("://") => to.to_string(),
        to if to.starts_with("//") => format!("{}:{to}", origin.0),
        to if to.starts_with('/') => format!("{root}{to}"),
        to if folder.is_empty() => format!("{root}/{to}"),
        to => format!("{root}{folder}{to}"),
    };
    let next = Origin::of(&target).ok_or_else(|| format!("a redirect to `{to}`"))?;
    if origin.0 == "https" && next.0 != "https" {
        return Err(format!("a redirect from https to `{to}`"));
    }
    Ok(target)
}

/// The address that a `Link` header calls `next`.
fn next_of(link: &str) -> Option<String> {
    let next = link.split(',').find(|part| part.contains("rel=\"next\""))?;
    let (_, rest) = next.split_once('<')?;
    Some(rest.split_once('>')?.0.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_resolved_and_never_leave_https() {
        let from = "https://a.example/x/y?z=/1/";
        let cases = [
            ("https://b.example/f", "https://b.example/f"),
            ("//b.example/f", "https://b.example/f"),
            ("/f?g", "https://a.example/f?g"),
            ("f", "https://a.example/x/f"),
        ];
        cases.iter().for_each(|(to, expected)| assert_eq!(follow(from, to).as_deref(), Ok(*expected)));
        assert_eq!(follow("http://a.example", "f").as_deref(), Ok("http://a.example/f"));
        for bad in ["", "http://a.example/f", "ftp://a.example/f", "file:///etc/passwd"] {
            assert!(follow(from, bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn origins_tell_hosts_schemes_and_ports_apart() {
        let same = Origin::of("https://Hub.example:443/a").unwrap();
        assert_eq!(Origin::of("https://hub.example/b"), Some(same.clone()));
        for other in [
            "http://hub.example",
            "https://hub.example:444",
            "https://hub.example.evil",
            "https://x.hub.example",
        ] {
            assert_ne!(Origin::of(other), Some(same.clone()), "{other}");
        }
        // What stands before an @ is no host.
        assert_ne!(Origin::of("https://hub.example@evil.example/"), Some(same));
        assert_eq!(Origin::of("/etc/passwd"), None);
        assert!(!Origin::of("http://hub.example").unwrap().is_private());
        assert!(Origin::of("http://127.0.0.1:8080").unwrap().is_private());
    }

    #[test]
    fn lists_in_parts_name_the_next() {
        let link = "<https://a/x?cursor=1>; rel=\"prev\", <https://a/x?cursor=3>; rel=\"next\"";
        assert_eq!(next_of(link).as_deref(), Some("https://a/x?cursor=3"));
        assert_eq!(next_of("<https://a>; rel=\"prev\""), None);
    }
}
