//! `hotset sweep -o x.parquet`: read with the crate's own reader, it is the CSV of the same sweep.

use std::fs::{self, File};

use ::parquet::basic::{LogicalType, Type};
use ::parquet::file::reader::{FileReader, SerializedFileReader};
use ::parquet::record::Field;

use crate::cli::hotset;
use crate::golden::data;

/// What a cell is in CSV, and its column's type.
fn cell(field: &Field) -> (String, Type) {
    match field {
        Field::Str(text) => (text.clone(), Type::BYTE_ARRAY),
        Field::Long(n) => (n.to_string(), Type::INT64),
        Field::Double(n) => (n.to_string(), Type::DOUBLE),
        other => panic!("{other:?}"),
    }
}

#[test]
fn is_the_csv_with_types() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (trace, keep) = (data("small.q4rt"), data("small.keep_map.json"));
    let (trace, keep) = (trace.to_str().unwrap(), keep.to_str().unwrap());
    let sweep = |out: &str, more: &[&str]| {
        let args = ["sweep", trace, "--k-used", "8", "--cache-caps", "12,24", "--keep-map", keep, "-o", out];
        hotset(&[&args, more].concat())
    };
    let (csv, whole) = (path("whole.csv"), path("whole.parquet"));
    assert!(sweep(&csv, &[]).status.success());
    let done = sweep(&whole, &[]);
    assert!(done.status.success(), "{done:?}");
    let said = String::from_utf8(done.stdout).unwrap();
    assert!(said.contains("whole.parquet: 108 rows") && said.contains("checked: belady_min"), "{said}");
    let text = fs::read_to_string(&csv).unwrap();

    let reader = SerializedFileReader::new(File::open(&whole).unwrap()).unwrap();
    assert_eq!(reader.num_row_groups(), 1);
    let schema = reader.metadata().file_metadata().schema();
    let names: Vec<&str> = schema.get_fields().iter().map(|f| f.name()).collect();
    let mut lines = text.lines();
    assert_eq!(names.join(","), lines.next().unwrap());
    let mut rows = 0;
    for row in reader.get_row_iter(None).unwrap() {
        let columns = row.unwrap().into_columns();
        let cells: Vec<(String, Type)> = columns.iter().map(|(_, field)| cell(field)).collect();
        let line: Vec<&str> = cells.iter().map(|(text, _)| text.as_str()).collect();
        assert_eq!(line.join(","), lines.next().unwrap());
        for (field, (_, found)) in schema.get_fields().iter().zip(&cells) {
            assert_eq!(field.get_physical_type(), *found);
            let text = (*found == Type::BYTE_ARRAY).then_some(LogicalType::String);
            assert_eq!(field.get_basic_info().logical_type_ref(), text.as_ref());
        }
        rows += 1;
    }
    assert_eq!((rows, lines.next()), (108, None));
    let type_of = |name| schema.get_fields()[names.iter().position(|n| *n == name).unwrap()].get_physical_type();
    assert_eq!(["trace", "policy", "variant", "delta"].map(type_of), [Type::BYTE_ARRAY; 4]);
    assert_eq!(["setting", "cache_cap", "protect_top_j", "misses"].map(type_of), [Type::INT64; 4]);
    assert_eq!(["lambda_moce", "expert_bytes", "hit_rate", "tok_s_6.8GBs"].map(type_of), [Type::DOUBLE; 4]);
}

/// Cut off anywhere it goes on, what lies beside it is gone when it is whole, and shards of any kind make the same table.
#[test]
fn resumes_and_merges() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let trace = data("small.q4rt");
    let trace = trace.to_str().unwrap();
    let sweep = |out: &str, more: &[&str]| {
        let output = hotset(&[&["sweep", trace, "--k-used", "8", "--cache-caps", "24", "-o", out], more].concat());
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (csv, whole) = (path("whole.csv"), path("whole.parquet"));
    assert_eq!(sweep(&csv, &[]).0, Some(0));
    assert_eq!(sweep(&whole, &[]).0, Some(0));
    let (text, bytes) = (fs::read_to_string(&csv).unwrap(), fs::read(&whole).unwrap());
    let again = path("again.parquet");
    let partial = path("again.parquet.partial.csv");
    for cut in [0, 10, text.len() / 2, text.len() - 1, text.len()] {
        let _ = fs::remove_file(&again);
        fs::write(&partial, &text[..cut]).unwrap();
        let (status, said) = sweep(&again, &[]);
        assert_eq!(status, Some(0), "{said}");
        assert_eq!(said.contains("are there already"), cut > text.len() / 3, "cut at {cut}: {said}");
        assert!(fs::read(&again).unwrap() == bytes, "cut at {cut}");
        assert!(!fs::exists(&partial).unwrap());
    }
    // Done is done; another sweep does not go over it.
    assert!(sweep(&again, &[]).1.contains("27 of 27 rows are there already"));
    let (status, said) = sweep(&again, &["--warmup", "32"]);
    assert!(status == Some(1) && said.contains("another sweep"), "{said}");
    assert!(fs::read(&again).unwrap() == bytes && !fs::exists(&partial).unwrap());

    let parts = [path("1.parquet"), path("2.csv"), path("3.parquet")];
    for (i, part) in parts.iter().enumerate() {
        assert_eq!(sweep(part, &["--shard", &format!("{}/3", i + 1)]).0, Some(0));
    }
    for (out, wanted) in [(path("merged.parquet"), bytes.as_slice()), (path("merged.csv"), text.as_bytes())] {
        let merge = hotset(&["sweep", "--merge", "-o", &out, &parts[2], &parts[0], &parts[1]]);
        assert!(merge.status.success(), "{merge:?}");
        assert!(fs::read(&out).unwrap() == wanted);
    }
    let missing = hotset(&["sweep", "--merge", "-o", &path("no.parquet"), &parts[0], &parts[1]]);
    assert!(String::from_utf8(missing.stderr).unwrap().contains("missing"));
    // A shard without rows, and what is no table at all.
    assert_eq!(sweep(&path("none.parquet"), &["--shard", "1/100"]).0, Some(0));
    fs::write(path("bad.parquet"), &bytes[..bytes.len() - 9]).unwrap();
    let (status, said) = sweep(&path("bad.parquet"), &[]);
    assert!(status == Some(1) && said.contains("bad.parquet"), "{said}");
}
