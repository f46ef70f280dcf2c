//! Which crate may depend on which: `core <- data, parallel, infer <- algos <- cli`.

use crate::workspace::Member;

/// A crate and the members that it may depend on. `data`, `parallel` and `infer` never see each
/// other: they meet through the traits of core.
const ARROWS: &[(&str, &[&str])] = &[
    ("aligner-core", &[]),
    ("aligner-data", &["aligner-core"]),
    ("aligner-parallel", &["aligner-core"]),
    ("aligner-infer", &["aligner-core"]),
    ("aligner-algos", &["aligner-core", "aligner-data", "aligner-parallel", "aligner-infer"]),
    ("aligner-cli", &["aligner-core", "aligner-data", "aligner-parallel", "aligner-infer", "aligner-algos"]),
    ("xtask", &[]),
];

/// One line for each arrow that points the wrong way, and for each crate without a rule.
pub(super) fn check(members: &[Member]) -> Vec<String> {
    members.iter().flat_map(check_member).collect()
}

fn check_member(member: &Member) -> Vec<String> {
    let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == member.name) else {
        return vec![format!("{}: no rule says what this crate may depend on", member.name)];
    };
    let forbidden = member.depends_on.iter().filter(|name| !allowed.contains(&name.as_str()));
    forbidden.map(|name| format!("{} depends on {name}; it may depend on {allowed:?}", member.name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, depends_on: &[&str]) -> Member {
        Member {
            name: name.into(),
            manifest: "Cargo.toml".into(),
            depends_on: depends_on.iter().map(|&name| name.to_owned()).collect(),
            features: Vec::new(),
        }
    }

    #[test]
    fn siblings_must_not_see_each_other() {
        let wrong = check(&[member("aligner-infer", &["aligner-core", "aligner-data"])]);
        assert_eq!(wrong.len(), 1);
        assert!(wrong[0].starts_with("aligner-infer depends on aligner-data"), "{}", wrong[0]);
    }

    #[test]
    fn the_chain_itself_is_allowed() {
        let chain = [member("aligner-core", &[]), member("aligner-algos", &["aligner-core", "aligner-data"])];
        assert!(check(&chain).is_empty());
    }

    #[test]
    fn a_crate_without_a_rule_is_reported() {
        assert_eq!(check(&[member("aligner-extra", &[])]).len(), 1);
    }
}
