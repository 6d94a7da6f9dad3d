//! `hotset ab run` with engines that are shell scripts: what goes to them, what is made of their logs, and what goes wrong. With real
//! engines: tests/c_host.rs (a C program), bench/llama/tests/experiment.rs (llama.cpp).

#[path = "common/program.rs"]
mod program;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use program::{fails, hotset, ok};
use serde_json::Value;

/// Eight blocks of 20 tokens, two cells by turns.
fn plan(dir: &Path) -> PathBuf {
    let cell = |i: usize| ["A", "B", "B", "A"][i % 4];
    let blocks: Vec<String> =
        (0..8).map(|i| format!("{{\"cell\":\"{}\",\"from\":{},\"tokens\":20}}", cell(i), 20 * i)).collect();
    let text = format!(
        "{{\"hotset_schedule\":1,\"washout\":2,\"cells\":[{{\"name\":\"A\"}},{{\"name\":\"B\"}}],\n\"blocks\":[{}]}}",
        blocks.join(",\n")
    );
    let path = dir.join("given.json");
    std::fs::write(&path, text).unwrap();
    path
}

/// A log as the hook writes it: B takes twice the time of A.
const LOGS: &str = r#"
    [ -f "$HOTSET_SCHEDULE" ] || exit 9
    echo "prints this, slots $HOTSET_SLOTS"
    awk 'BEGIN {
        srand(SEED); print "pass,phase,position,tokens,wall_ns,pass_ns,wait_ns,reads,read_bytes,hits,misses,dropped,swapped,mass_dropped,mass_swapped,pass_through_rows,slots,lambda,drop,cell,block,washout,major_faults,rss_bytes,disk_bytes,thermal_level,thermal_mc"
        for (t = 0; t < 160; t++) {
            block = int(t / 20); b = (block % 4 == 1 || block % 4 == 2)
            ns = int(1000000 * (1 + b) * (1 + 0.1 * rand()))
            printf "%d,decode,%d,1,%s,%d,0,0,0,10,0,0,0,0,0,0,8,0,0,%s,%d,%d,0,1000000,0,,\n", t, t, t ? ns : "", ns, b ? "B" : "A", block, t % 20 < 2
        }
    }' > "$HOTSET_METRICS"
"#;

fn ab(dir: &Path, out: &str, flags: &[&str], script: &str) -> Command {
    let mut command = hotset();
    command.args(["ab", "run", "--plan"]).arg(plan(dir)).arg("--out").arg(dir.join(out)).args(flags);
    command.args(["--", "sh", "-c", script]);
    for name in ["HOTSET_SCHEDULE", "HOTSET_METRICS"] {
        command.env_remove(name);
    }
    command
}

#[test]
fn an_engine_is_run_and_what_it_logs_analysed() {
    let dir = tempfile::tempdir().unwrap();
    let script = LOGS.replace("SEED", "1");
    let text = ok(ab(dir.path(), "x", &[], &script).env("HOTSET_SLOTS", "8"));
    assert!(text.contains("A") && text.contains("tok/s"), "{text}");
    let at = |name: &str| dir.path().join("x").join(name);
    assert_eq!(std::fs::read_to_string(at("run-1.txt")).unwrap(), "prints this, slots 8\n");
    assert!(std::fs::read_to_string(at("plan.json")).unwrap().contains("\"runs\":1"));
    let analysis: Value = serde_json::from_slice(&std::fs::read(at("analysis.json")).unwrap()).unwrap();
    assert_eq!(analysis["cells"][0]["name"], "A");
    // what is there stays
    fails(&mut ab(dir.path(), "x", &[], &script), 1, "is not empty");

    let text = ok(&mut ab(dir.path(), "y", &["--runs", "3", "--json", "--baseline", "A"], &script));
    let analysis: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((analysis["runs"].as_array().unwrap().len(), analysis["comparisons"].as_array().unwrap().len()), (3, 1));
    let c = &analysis["comparisons"][0];
    let ratio = c["by_pairs"]["log_ratio"].as_f64().unwrap();
    assert!((ratio - 2f64.ln()).abs() < 0.05, "{c}");
}

/// Without a plan file it is planned here, and the plan that ran is in the folder.
#[test]
fn plans_are_made_where_none_is_given() {
    let dir = tempfile::tempdir().unwrap();
    let run = |out: &str, flags: &[&str]| {
        let mut command = hotset();
        command.args(["ab", "run"]).args(flags).arg("--out").arg(dir.path().join(out));
        command.args(["--", "sh", "-c", &LOGS.replace("SEED", "1").replace("\"B\" : \"A\"", "\"F1\" : \"F0\"")]);
        command
    };
    let made = ["--drop", "0,1", "--tokens", "160", "--block", "20", "--washout", "2"];
    ok(&mut run("x", &made));
    let plan = std::fs::read(dir.path().join("x/plan.json")).unwrap();
    let plan = hotset::hook::Schedule::parse(&plan).unwrap();
    assert_eq!(
        (plan.cells[1].name.as_str(), plan.cells[1].drop, plan.blocks.len(), plan.washout),
        ("F1", Some(1.0), 8, 2)
    );
    fails(&mut run("y", &[]), 2, "--tokens");
    fails(&mut run("y", &["--tokens", "100", "--drop", "0,1"]), 2, "blocks");
    fails(&mut run("y", &[&["--plan", "p.json"][..], &made].concat()), 2, "--plan");
    assert!(!dir.path().join("y").exists());
}

#[test]
fn what_goes_wrong_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let run = |out: &str, script: &str, code: i32, says: &str| fails(&mut ab(dir.path(), out, &[], script), code, says);
    run("a", "echo no such model >&2; exit 3", 1, "no such model");
    run("b", "exit 3", 1, "exit status: 3");
    run("c", "true", 1, "it must call hotset_params_from_env");
    let unlabelled =
        LOGS.replace("b ? \"B\" : \"A\", block", "\"\", \"\"").replace(",%s,%d,%d,0,1000000", ",%s,%s,%d,0,1000000");
    run("d", &unlabelled, 1, "no token is in a block of the plan (159 decode tokens)");
    run("e", "echo broken > $HOTSET_METRICS", 1, "run-1.csv");
    let mut none = hotset();
    none.args(["ab", "run", "--plan"]).arg(plan(dir.path())).arg("--out").arg(dir.path().join("f"));
    // an emulated process is told of a failed start by the started one's exit, as a shell would be
    let emulated = std::env::var_os("HOTSET_TEST_RUNNER").is_some();
    let says = if emulated { "exit status: 127" } else { "/no/such/engine cannot be started" };
    fails(none.args(["--", "/no/such/engine"]), 1, says);
    let bad = dir.path().join("bad.json");
    std::fs::write(&bad, "{\n\"cells\": 3}").unwrap();
    let mut command = hotset();
    command.args(["ab", "run", "--plan"]).arg(&bad).arg("--out").arg(dir.path().join("g")).args(["--", "true"]);
    fails(&mut command, 1, "bad.json: line 1: a schedule without");
    assert!(!dir.path().join("g").exists());
    // fewer tokens than planned are analysed, and said to be fewer
    let fewer = LOGS.replace("t < 160", "t < 140");
    let output = ab(dir.path(), "h", &[], &fewer).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("decoded 139 of the plan's 160 tokens"), "{said}");
}

#[test]
fn the_engine_ends_with_its_runner() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    let script = format!("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 600", pid.display());
    let mut runner = ab(dir.path(), "x", &[], &script).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !pid.exists() {
        assert!(Instant::now() < deadline, "the engine was not started");
        std::thread::sleep(Duration::from_millis(10));
    }
    let engine = std::fs::read_to_string(&pid).unwrap();
    let signal = |flag: &str, pid: &str| {
        Command::new("kill").args([flag, pid.trim()]).stderr(Stdio::null()).status().unwrap().success()
    };
    assert!(signal("-0", &engine), "it runs");
    assert!(signal("-TERM", &runner.id().to_string()));
    assert_eq!(runner.wait().unwrap().code(), Some(1));
    let mut said = String::new();
    std::io::Read::read_to_string(&mut runner.stderr.take().unwrap(), &mut said).unwrap();
    assert!(said.contains("ended from outside after 0 tokens"), "{said}");
    assert!(!signal("-0", &engine), "it has ended");
}
