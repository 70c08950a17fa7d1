//! Connections, with limits on what a client can hold.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Connections open at once.
const CONNECTIONS: usize = 512;
/// Time for the head of a request to arrive, and between requests of a connection.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// Most bytes of the head.
const HEAD: usize = 64 << 10;
/// Most header lines.
const HEADERS: usize = 100;

/// Serves connections until `stop` is done. A client that goes away has its requests given up.
pub async fn listen(listener: TcpListener, router: Router, stop: impl Future<Output = ()>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let mut stop = std::pin::pin!(stop);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => return,
        };
        // A connection that fails to open is its client's affair; without descriptors left, others have to close first.
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        // Beyond the limit connections are closed at once.
        let Ok(place) = places.clone().try_acquire_owned() else { continue };
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIME)
                .max_buf_size(HEAD)
                .max_headers(HEADERS);
            // It ends with the client's going away, or with an error of its making.
            let _ = http.serve_connection(TokioIo::new(stream), service).await;
            drop(place);
        });
    }
}
