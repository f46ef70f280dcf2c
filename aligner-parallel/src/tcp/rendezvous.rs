//! Where ranks meet, as whoever started them says it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

use aligner_core::{Error, Phase, Result};

/// Variables that tell the rank, the size and the rank among those of a machine, by launcher.
const RANK: [&str; 3] = ["RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"];
const SIZE: [&str; 2] = ["WORLD_SIZE", "SLURM_NTASKS"];
const LOCAL_RANK: [&str; 3] = ["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"];

/// Where the ranks of a run meet, and which of them this process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendezvous {
    /// This rank, from 0.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// The machine of rank 0: a name or an address. Where it is this machine's own (`localhost`,
    /// `127.0.0.1`), ranks listen for this machine alone.
    pub host: String,
    /// Where rank 0 listens.
    pub port: u16,
    /// How long ranks wait for those that have not come.
    pub deadline: Duration,
}

impl Rendezvous {
    /// The port where no other is said.
    pub const PORT: u16 = 29_500;

    /// What the environment says: `MASTER_ADDR`, `MASTER_PORT` (29500 without it), `WORLD_SIZE` and `RANK`, or
    /// in their place Slurm's `SLURM_NTASKS` and `SLURM_PROCID`, or `JOB_COMPLETION_INDEX` for the rank, of
    /// Kubernetes' indexed jobs. None where there is no `MASTER_ADDR`, or one rank alone.
    ///
    /// # Errors
    /// [`Error::Setting`] by the variable: one that is missing beside the others, or is no number, and a rank
    /// that is not below the size.
    pub fn of_environment() -> Result<Option<Self>> {
        Self::of(|name| std::env::var(name).ok())
    }

    fn of(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let host = variable("MASTER_ADDR").filter(|host| !host.is_empty());
        let Some((_, size)) = number(&SIZE, &variable)?.filter(|&(_, size)| size > 1) else {
            return Ok(None);
        };
        let rank = number(&RANK, &variable)?;
        let Some(host) = host else {
            // Slurm tells its numbers to every process; those of the others are meant.
            if variable("WORLD_SIZE").is_some() && variable("RANK").is_some() {
                let message =
                    format!("expected the machine of rank 0, as WORLD_SIZE is {size}; it is not set");
                return Err(Error::setting("MASTER_ADDR", message));
            }
            return Ok(None);
        };
        let Some((name, rank)) = rank else {
            let message = format!("expected a number below {size}, as WORLD_SIZE is {size}; it is not set");
            return Err(Error::setting("RANK", message));
        };
        if rank >= size {
            return Err(Error::setting(name, format!("expected a number below {size}, got {rank}")));
        }
        let port = match number(&["MASTER_PORT"], &variable)? {
            None => Self::PORT,
            Some((name, port)) => port
                .try_into()
                .map_err(|_| Error::setting(name, format!("expected a port below 65536, got {port}")))?,
        };
        Ok(Some(Self { rank, size, host, port, deadline: Phase::DEADLINE }))
    }

    /// Listens where rank 0 is to be found.
    pub(super) fn listen(&self) -> Result<TcpListener> {
        let ip =
            if self.is_local() { self.host.parse().unwrap_or(Ipv4Addr::LOCALHOST.into()) } else { any_v6() };
        let address = SocketAddr::new(ip, self.port);
        // A machine may have no addresses of the newer kind.
        let listener = TcpListener::bind(address).or_else(|error| {
            if self.is_local() { Err(error) } else { TcpListener::bind((Ipv4Addr::UNSPECIFIED, self.port)) }
        });
        listener.map_err(|error| {
            Error::Invalid(format!("rank 0 of {} cannot listen on port {}: {error}", self.size, self.port))
        })
    }

    /// Whether all ranks are on this machine.
    pub(super) fn is_local(&self) -> bool {
        let ip = self.host.parse::<IpAddr>();
        self.host == "localhost" || ip.is_ok_and(|ip| ip.is_loopback())
    }
}

fn any_v6() -> IpAddr {
    Ipv6Addr::UNSPECIFIED.into()
}

/// This process's number among those of its machine, as its launcher says it: `LOCAL_RANK`, Slurm's
/// `SLURM_LOCALID` or Open MPI's `OMPI_COMM_WORLD_LOCAL_RANK`. None where nobody says it.
///
/// # Errors
/// [`Error::Setting`] where it is no number.
pub fn local_rank() -> Result<Option<usize>> {
    Ok(number(&LOCAL_RANK, |name| std::env::var(name).ok())?.map(|(_, number)| number))
}

/// The first of these variables that is set, with its name.
fn number(
    names: &[&'static str],
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<(&'static str, usize)>> {
    let set = names.iter().find_map(|&name| Some((name, variable(name)?)));
    let Some((name, text)) = set else { return Ok(None) };
    let number = text.trim().parse();
    let number = number.map_err(|_| Error::setting(name, format!("expected a number, got `{text}`")))?;
    Ok(Some((name, number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> std::result::Result<Option<Rendezvous>, String> {
        let value = |name: &str| {
            variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned())
        };
        Rendezvous::of(value).map_err(|error| error.to_string())
    }

    #[test]
    fn launchers_say_it_in_their_own_ways() {
        let expected =
            |port| Rendezvous { rank: 3, size: 4, host: "node1".into(), port, deadline: Phase::DEADLINE };
        let host = ("MASTER_ADDR", "node1");
        let torchrun =
            [host, ("MASTER_PORT", "700"), ("RANK", "3"), ("WORLD_SIZE", "4"), ("SLURM_PROCID", "1")];
        assert_eq!(of(&torchrun), Ok(Some(expected(700))));
        assert_eq!(of(&[host, ("SLURM_PROCID", "3"), ("SLURM_NTASKS", "4")]), Ok(Some(expected(29_500))));
        assert_eq!(
            of(&[host, ("JOB_COMPLETION_INDEX", "3"), ("WORLD_SIZE", "4")]),
            Ok(Some(expected(29_500)))
        );
    }

    #[test]
    fn one_rank_needs_no_other_and_mistakes_are_named() {
        let host = ("MASTER_ADDR", "node1");
        assert_eq!(of(&[host, ("RANK", "0"), ("WORLD_SIZE", "1")]), Ok(None));
        assert_eq!(
            of(&[("SLURM_PROCID", "3"), ("SLURM_NTASKS", "4")]),
            Ok(None),
            "a job of one process each"
        );
        for (variables, expected) in [
            (&[("RANK", "0"), ("WORLD_SIZE", "2")][..], "MASTER_ADDR: expected the machine of rank 0"),
            (&[host, ("WORLD_SIZE", "2")], "RANK: expected a number below 2"),
            (&[host, ("RANK", "2"), ("WORLD_SIZE", "2")], "RANK: expected a number below 2, got 2"),
            (&[host, ("RANK", "x"), ("WORLD_SIZE", "2")], "RANK: expected a number, got `x`"),
            (&[host, ("RANK", "0"), ("WORLD_SIZE", "-1")], "WORLD_SIZE: expected a number, got `-1`"),
            (
                &[host, ("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "70000")],
                "MASTER_PORT: expected a port",
            ),
        ] {
            let error = of(variables).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
