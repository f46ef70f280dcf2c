//! How ranks find each other: all come to rank 0, which tells each where the others are, and then each of
//! two connects to the one with the smaller number.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{Error as IoError, ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use aligner_core::{Error, Result};

use super::door::{Door, Greeted, is_closed};
use super::greeting::{Answer, Hello, left};
use super::rendezvous::Rendezvous;
use crate::call::name_ranks;

/// Between two looks at the door.
const PAUSE: Duration = Duration::from_millis(2);

/// Between two tries to reach rank 0, which may start later.
const RETRY: Duration = Duration::from_millis(50);

/// How long one try may take, so that a name which is wrong at first is looked up again.
const TRY: Duration = Duration::from_secs(5);

/// How much longer than rank 0 the others wait, so that they hear whom it misses; and how long ranks that
/// have all come may take to connect.
const GRACE: Duration = Duration::from_secs(5);

/// Connections by rank; none to itself.
type Streams = Vec<Option<TcpStream>>;

/// What went right, or what went wrong in words.
type Told<T> = std::result::Result<T, String>;

/// A rank that has come to rank 0.
struct Guest {
    stream: TcpStream,
    from: SocketAddr,
    port: u16,
}

/// Rank 0: waits for all others, and tells each where the others are.
pub(super) fn as_main(listener: TcpListener, rendezvous: &Rendezvous) -> Result<Streams> {
    let (size, until) = (rendezvous.size, Instant::now() + rendezvous.deadline);
    let fail = |text: &dyn std::fmt::Display| Error::Invalid(format!("rank 0 of {size}: {text}"));
    let mut door = Door::new(listener, size).map_err(|error| fail(&error))?;
    let mut came: Vec<Option<Guest>> = (0..size).map(|_| None).collect();
    while came.iter().skip(1).any(Option::is_none) {
        for greeted in door.greeted() {
            if let Err((text, mut stream)) = seat(&mut came, greeted) {
                refuse(&text, came.iter_mut().flatten().map(|guest| &mut guest.stream).chain([&mut stream]));
                return Err(fail(&text));
            }
        }
        // Who goes away may come again: a launcher starts it anew.
        for guest in &mut came {
            guest.take_if(|guest| is_closed(&guest.stream));
        }
        if Instant::now() > until {
            let missing: Vec<usize> = (1..size).filter(|&rank| came[rank].is_none()).collect();
            let stranger = door.stranger.map(|from| format!("; what came from {from} was no rank"));
            let text = format!(
                "{} did not come within {:.1} s{}",
                name_ranks(&missing),
                rendezvous.deadline.as_secs_f64(),
                stranger.unwrap_or_default()
            );
            refuse(&text, came.iter_mut().flatten().map(|guest| &mut guest.stream));
            return Err(fail(&text));
        }
        std::thread::sleep(PAUSE);
    }
    let places =
        came.iter().flatten().map(|guest| SocketAddr::new(guest.from.ip().to_canonical(), guest.port));
    let table = Answer::Table(run_number(), places.collect());
    let until = Instant::now() + GRACE;
    for (rank, guest) in came.iter_mut().enumerate() {
        let Some(guest) = guest else { continue };
        let sent = table.send(&mut guest.stream, until);
        sent.map_err(|error| fail(&format!("rank {rank} went away as ranks met: {error}")))?;
    }
    Ok(came.into_iter().map(|guest| guest.map(|guest| guest.stream)).collect())
}

/// Gives a rank its seat, if it is one of this run's; else says why, and gives the connection back.
fn seat(came: &mut [Option<Guest>], greeted: Greeted) -> std::result::Result<(), (String, TcpStream)> {
    let Greeted { hello, stream, from } = greeted;
    let size = came.len();
    let hello = match hello {
        Ok(hello) => hello,
        Err(text) => return Err((format!("a rank came from {from}, but {text}"), stream)),
    };
    let rank = hello.rank;
    if hello.size != size {
        let theirs = hello.size;
        return Err((
            format!("rank {rank} ({from}) is one of {theirs} ranks, and rank 0 one of {size}"),
            stream,
        ));
    }
    if rank == 0 || rank >= size {
        return Err((format!("what came from {from} says that it is rank {rank} of {size}"), stream));
    }
    match &came[rank] {
        Some(other) if !is_closed(&other.stream) => {
            let first = other.from;
            Err((
                format!("two processes say that they are rank {rank}: those of {first} and of {from}"),
                stream,
            ))
        }
        _ => {
            came[rank] = Some(Guest { stream, from, port: hello.port });
            Ok(())
        }
    }
}

fn refuse<'a>(text: &str, streams: impl Iterator<Item = &'a mut TcpStream>) {
    let until = Instant::now() + Duration::from_secs(1);
    for stream in streams {
        // Who does not hear it is gone, or finds out at its own deadline.
        let _ = Answer::Refusal(text.into()).send(stream, until);
    }
}

/// A number that no other run has, but by a chance of one in 2^64.
fn run_number() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// What a rank knows when all have come to rank 0.
struct Known {
    /// The connection to rank 0.
    main: TcpStream,
    door: Door,
    run: u64,
    /// Where each rank but rank 0 listens, as rank 0 sees it.
    places: Vec<SocketAddr>,
}

/// Any other rank: comes to rank 0, hears from it where the others are, and meets them.
pub(super) fn as_other(rendezvous: &Rendezvous) -> Result<Streams> {
    let until = Instant::now() + rendezvous.deadline;
    let met = hear(rendezvous, until).and_then(|known| meet(rendezvous, known, until));
    met.map_err(|text| Error::Invalid(format!("rank {} of {}: {text}", rendezvous.rank, rendezvous.size)))
}

/// Comes to rank 0, and waits until it knows where all are.
fn hear(rendezvous: &Rendezvous, until: Instant) -> Told<Known> {
    let (size, host, port) = (rendezvous.size, &rendezvous.host, rendezvous.port);
    loop {
        let (mut main, listener) = reach(rendezvous, until)?;
        let door = Door::new(listener, size).map_err(|error| error.to_string())?;
        let what = match Answer::receive(&mut main, size, until + GRACE) {
            Ok(Answer::Table(run, places)) => return Ok(Known { main, door, run, places }),
            Ok(Answer::Refusal(text)) => return Err(text),
            Ok(Answer::Welcome) => "it is another rank".into(),
            // It has gone away, and its launcher may start it anew.
            Err(error) if went_away(&error) && Instant::now() < until => {
                std::thread::sleep(RETRY);
                continue;
            }
            Err(error) if went_away(&error) => "it has gone away".into(),
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                "it did not say in time where the others are".into()
            }
            Err(error) => error.to_string(),
        };
        return Err(format!("rank 0 at {host}:{port}: {what}"));
    }
}

/// Connects to the ranks with smaller numbers, and lets in the others.
fn meet(rendezvous: &Rendezvous, known: Known, until: Instant) -> Told<Streams> {
    let Rendezvous { rank, size, .. } = *rendezvous;
    let Known { main, mut door, run, places } = known;
    let until = until.max(Instant::now() + GRACE);
    let main_ip = main.peer_addr().map_err(|error| error.to_string())?.ip().to_canonical();
    let mut streams: Streams = (0..size).map(|_| None).collect();
    streams[0] = Some(main);
    let hello = Hello { size, rank, run, port: 0 };
    for other in 1..rank {
        let place = seen_from_here(places[other - 1], main_ip);
        let stream = call_on(place, hello, until);
        let cannot = |error| format!("rank {other} at {place} cannot be reached: {error}");
        streams[other] = Some(stream.map_err(cannot)?);
    }
    for other in 1..rank {
        let Some(stream) = &mut streams[other] else { continue };
        let said = match Answer::receive(stream, size, until) {
            Ok(Answer::Welcome) => continue,
            Ok(answer) => format!("it said {answer:?}"),
            Err(error) if went_away(&error) => "it went away".into(),
            Err(error) => error.to_string(),
        };
        return Err(format!("rank {other} at {} did not meet this one: {said}", places[other - 1]));
    }
    admit(&mut door, hello, &mut streams, until)?;
    Ok(streams)
}

/// Lets in the ranks with larger numbers than `own`.
fn admit(door: &mut Door, own: Hello, streams: &mut Streams, until: Instant) -> Told<()> {
    while streams[own.rank + 1..].iter().any(Option::is_none) {
        for Greeted { hello, mut stream, from } in door.greeted() {
            // What is of another run has come to the wrong door.
            let Some(hello) = hello.ok().filter(|hello| (hello.run, hello.size) == (own.run, own.size))
            else {
                continue;
            };
            let other = hello.rank;
            if other <= own.rank || other >= own.size || streams[other].is_some() {
                return Err(format!("what came from {from} says that it is rank {other}"));
            }
            let sent = Answer::Welcome.send(&mut stream, until);
            sent.map_err(|error| format!("rank {other} went away as ranks met: {error}"))?;
            streams[other] = Some(stream);
        }
        let mut known = streams.iter().enumerate();
        if let Some((gone, _)) = known.find(|(_, stream)| stream.as_ref().is_some_and(is_closed)) {
            return Err(format!("rank {gone} went away as ranks met"));
        }
        if Instant::now() > until {
            let missing: Vec<usize> =
                (own.rank + 1..own.size).filter(|&rank| streams[rank].is_none()).collect();
            return Err(format!("{} came to rank 0 and not to this one", name_ranks(&missing)));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Comes to rank 0, as soon as it is there, and listens for the others.
fn reach(rendezvous: &Rendezvous, until: Instant) -> Told<(TcpStream, TcpListener)> {
    let Rendezvous { rank, size, ref host, port, .. } = *rendezvous;
    loop {
        let tried = connect((host.as_str(), port), until).and_then(|mut stream| {
            let listener = TcpListener::bind((listening_ip(rendezvous, stream.local_addr()?.ip()), 0))?;
            let port = listener.local_addr()?.port();
            stream.write_all(&Hello { size, rank, run: 0, port }.to_bytes())?;
            Ok((stream, listener))
        });
        match tried {
            Ok(reached) => return Ok(reached),
            Err(error) if Instant::now() + RETRY > until => {
                let waited = rendezvous.deadline.as_secs_f64();
                return Err(format!("no rank 0 at {host}:{port} within {waited:.1} s: {error}"));
            }
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

/// Where a rank listens that reached rank 0 from `own`.
fn listening_ip(rendezvous: &Rendezvous, own: IpAddr) -> IpAddr {
    match own {
        own if rendezvous.is_local() => own,
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

fn connect(place: impl ToSocketAddrs, until: Instant) -> std::io::Result<TcpStream> {
    let mut last = IoError::new(ErrorKind::NotFound, "the name has no address");
    for address in place.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(until).min(TRY)) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Connects to a rank that listens, and says who this is.
fn call_on(place: SocketAddr, hello: Hello, until: Instant) -> std::io::Result<TcpStream> {
    loop {
        let tried = connect(place, until).and_then(|mut stream| {
            stream.write_all(&hello.to_bytes())?;
            Ok(stream)
        });
        match tried {
            Err(_) if Instant::now() + RETRY < until => std::thread::sleep(RETRY),
            tried => return tried,
        }
    }
}

/// Where a rank is that rank 0 saw at `place`: what reached it within its own machine is where it is.
fn seen_from_here(place: SocketAddr, main: IpAddr) -> SocketAddr {
    if place.ip().is_loopback() { SocketAddr::new(main, place.port()) } else { place }
}

fn went_away(error: &IoError) -> bool {
    matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_the_main_machine_are_found_there() {
        let near: SocketAddr = "127.0.0.1:4000".parse().unwrap();
        let far: SocketAddr = "10.0.0.3:4000".parse().unwrap();
        let main: IpAddr = "10.0.0.1".parse().unwrap();
        assert_eq!(seen_from_here(near, main), "10.0.0.1:4000".parse().unwrap());
        assert_eq!(seen_from_here(far, main), far);
        assert_eq!(seen_from_here(near, near.ip()), near);
    }
}
