//! The command line, and the metrics logs that it reads.

use std::io::Cursor;

use hotset::replay::{DropSettings, PassTime, Routed, Rule, drop_loop, observed, observed_passes};

use crate::{HEADING, decode, program};

#[test]
fn metrics_at_fault_are_named() {
    let good = r#"{"phase":"decode","tokens":1,"read_bytes":8,"hits":1,"misses":2,"dropped":0,"swapped":0,"mass_dropped":0,"mass_swapped":0,"pass_through_rows":0,"slots":4,"lambda":0,"drop":0.5}"#;
    let read = |text: String| observed(&mut Cursor::new(text));
    assert_eq!(read(format!("{good}\n{good}\n")).unwrap()[0].misses, 4);
    for (from, to, says) in [
        ("\"misses\":2", "\"misses\":-2", "line 2, column 54: misses: a whole number wanted, -2 found"),
        ("\"misses\":2,", "", "line 2, column 166: no misses"),
        ("decode", "idle", "line 2, column 2: phase"),
        ("\"drop\":0.5", "\"drop\":null", "line 2, column 166: drop: a number of 0 or more wanted, null found"),
        ("}", "", "line 2, column"),
    ] {
        let error = read(format!("{good}\n{}\n", good.replace(from, to))).unwrap_err();
        assert!(error.detail.contains(says), "{error} does not say {says}");
    }
    assert!(read("a,b\n1\n".into()).unwrap_err().detail.contains("line 2, column 2: 2 fields wanted"));
    assert!(read("a,b\n1,2,3\n".into()).unwrap_err().detail.contains("line 2, column 5: 2 fields wanted"));
    let csv = "phase,tokens,misses\ndecode,1,x\n".replace("misses", "slots");
    assert!(read(csv).unwrap_err().detail.contains("line 2, column 10: slots: a whole number wanted, \"x\" found"));
    assert!(read(String::new()).is_err());
}

#[test]
fn metrics_pass_by_pass() {
    let csv = "phase,wall_ns,pass_ns,wait_ns,tokens,read_bytes,hits,misses,dropped,swapped,mass_dropped,mass_swapped,\
               pass_through_rows,slots,lambda,drop\nprefill,,5,1,7,0,0,0,0,0,0,0,9,4,0,0\ndecode,9,8,2,1,0,3,1,0,0,0,0,0,4,0,0\n";
    let mut seen = Vec::new();
    observed_passes(&mut Cursor::new(csv), |pass, time| seen.push((pass.tokens, time))).unwrap();
    let time = |wall_ns, pass_ns, wait_ns| PassTime { wall_ns, pass_ns: Some(pass_ns), wait_ns: Some(wait_ns) };
    assert_eq!(seen, [(7, time(None, 5, 1)), (1, time(Some(9), 8, 2))]);
    let wrong = csv.replace("decode,9", "decode,-9");
    let error = observed_passes(&mut Cursor::new(wrong), |_, _| ()).unwrap_err();
    assert!(error.detail.contains("line 3, column 8: wall_ns: a whole number wanted, -9 found"), "{error}");
}

/// The command line on a small file: its JSON says what the library says, a fault names file and line, and what cannot be exits with 2.
#[test]
fn the_command() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("r.csv");
    let row = |step: u32, experts: [u32; 3]| {
        let [a, b, c] = experts;
        format!("0,1,{step},0,0,{a},0.6,0,100\n0,1,{step},0,1,{b},0.3,0,100\n0,1,{step},0,2,{c},0.1,{},100\n", step % 2)
    };
    let text: String = (0..20).map(|step| row(step, [step % 5, 5 + step % 2, 7 + step % 3])).collect();
    let text = format!("# n_layer=1 n_expert=10 n_expert_used=3\n{HEADING}{text}");
    std::fs::write(&path, &text).unwrap();
    let run = |args: &[&str]| {
        let out = program::hotset().arg("drop-replay").args(args).output().unwrap();
        (out.status.code(), String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap())
    };
    let file = path.to_str().unwrap();
    let (code, out, _) =
        run(&[file, "--f", "0.5,1", "--cache-cap", "4", "--k-used", "3,2", "--lambda", "0,0.1", "--json"]);
    assert_eq!(code, Some(0));
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let routed = Routed::from_csv(&mut Cursor::new(&text)).unwrap();
    let s = decode(&routed, Rule::Cold { threshold: 1.0 });
    assert_eq!(json["runs"][0]["static"][1]["avoided_bytes"], s.avoided_bytes);
    assert_eq!(json["runs"][0]["static"].as_array().unwrap().len(), 4, "two F, keep-top 2 and 1");
    let loops = json["runs"][0]["closed_loop"].as_array().unwrap();
    assert_eq!(loops.len(), 2 * 2 * 3);
    let settings = DropSettings { capacity: 4, k: 3, threshold: 1.0, ..DropSettings::default() };
    let (all, _) = drop_loop(&routed, &settings, &[]).unwrap();
    let same = |row: &&serde_json::Value| row["k"] == 3 && row["lambda"] == 0.0 && row["f"] == 1.0;
    assert_eq!(loops.iter().find(same).unwrap()["misses"], all.misses);
    assert!(loops.iter().any(|row| row["front"] == true));

    let (code, out, _) = run(&[file, "--keep-top", "1", "--cache-cap", "4"]);
    assert_eq!(code, Some(0));
    assert!(out.contains("keep top 1") && out.contains("closed loop, lru") && out.contains("F 0.75"), "{out}");
    assert_eq!(run(&[file, "--cache-cap", "2"]).0, Some(2), "fewer slots than k");
    let metrics = dir.path().join("m.csv");
    let names = "phase,tokens,read_bytes,hits,misses,dropped,swapped,mass_dropped,mass_swapped,pass_through_rows,slots,lambda,drop";
    std::fs::write(&metrics, format!("{names}\ndecode,2,10,1,2,3,0,0.5,0,0,4,0,1\n")).unwrap();
    let (code, out, _) = run(&[file, "--metrics", metrics.to_str().unwrap()]);
    assert!(code == Some(0) && out.contains("observed") && out.contains("25.00 %"), "{out}");
    assert_eq!(run(&[file, file, "--metrics", metrics.to_str().unwrap()]).0, Some(2));
    assert_eq!(run(&[file, "--f", "nan"]).0, Some(2));
    std::fs::write(&path, text.replace("0.3,0,100", "0.3,5,100")).unwrap();
    let (code, _, err) = run(&[file]);
    assert_eq!(code, Some(1));
    assert!(err.contains("r.csv") && err.contains("line 4, column 17: residency"), "{err}");
}

/// The questions that are put to a front are answered by rows of the table, text and JSON alike.
#[test]
fn the_best_within_a_limit() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("r.csv");
    let row = |step: u32, slot: u32, expert: u32, weight: f32| format!("0,1,{step},0,{slot},{expert},{weight},0,100\n");
    let of = |step: u32| row(step, 0, step % 3, 0.7) + &row(step, 1, 8 + step % 4, 0.3);
    let text: String = (0..40).map(of).collect();
    std::fs::write(&path, format!("# n_layer=1 n_expert=16 n_expert_used=2\n{HEADING}{text}")).unwrap();
    let command = || {
        let mut command = program::hotset();
        command.arg("drop-replay").arg(&path).args(["--f", "0.5,0.7,1", "--k-used", "2,1"]);
        command
    };
    let loops = ["--cache-cap", "4,8", "--max-mass", "10%", "--max-reads", "0.5", "--max-bytes", "0.001k"];
    let out = program::ok(command().args(loops).arg("--json"));
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let (rows, best) =
        (json["runs"][0]["closed_loop"].as_array().unwrap(), json["runs"][0]["best"].as_array().unwrap());
    assert_eq!(best.len(), 3 * 2, "limits by slots");
    let number = |row: &serde_json::Value, name: &str| row[name].as_f64().unwrap();
    let mut found = 0;
    for answer in best {
        // per token of 40 in one layer
        let mass = |row: &serde_json::Value| number(row, "mass_lost");
        let bytes = |row: &serde_json::Value| number(row, "bytes") / 40.0;
        let of_slots = rows.iter().filter(|row| row["cache_cap"] == answer["cache_cap"]);
        let within: Vec<_> = match (&answer["max_mass"], &answer["max_reads_per_token"], &answer["max_bytes_per_token"])
        {
            (limit, _, _) if limit == 0.1 => of_slots.filter(|row| mass(row) <= 0.1).collect(),
            (_, limit, _) if limit == 0.5 => of_slots.filter(|row| number(row, "misses") / 40.0 <= 0.5).collect(),
            (_, _, limit) if limit == 1.0 => of_slots.filter(|row| bytes(row) <= 1.0).collect(),
            _ => panic!("{answer}"),
        };
        let by_mass = answer["max_mass"].is_number();
        let key = |row: &&serde_json::Value| if by_mass { (bytes(row), mass(row)) } else { (mass(row), bytes(row)) };
        match within.iter().map(key).min_by(|a, b| a.partial_cmp(b).unwrap()) {
            Some(wanted) => {
                let row = &answer["row"];
                let got = (number(row, "bytes_per_token"), number(row, "mass_lost"));
                assert_eq!(if by_mass { got } else { (got.1, got.0) }, wanted);
                found += 1;
            }
            None => assert!(answer["row"].is_null(), "{answer}"),
        }
    }
    assert_eq!(found, 4, "a byte a token is too little: {best:?}");
    let text = program::ok(command().args(loops));
    assert!(
        text.contains("mass lost <= 10 %") && text.contains("reads/token <= 0.5") && text.contains("none"),
        "{text}"
    );
    program::fails(command().args(["--max-mass", "5%"]), 2, "say --cache-cap");
    for wrong in [["--max-mass", "101%"], ["--max-mass", "x"], ["--max-bytes", "-1"], ["--max-reads", "nan"]] {
        assert_eq!(
            command().args(["--cache-cap", "4"]).args(wrong).output().unwrap().status.code(),
            Some(2),
            "{wrong:?}"
        );
    }
}
