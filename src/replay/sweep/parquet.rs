//! A sweep's table as Parquet: the columns of its CSV in the same order, with their types; one row group, nothing compressed. Read back
//! it is the text of that CSV again, so whatever reads tables reads this one.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use ::parquet::basic::{ConvertedType, LogicalType, Repetition, Type as Physical};
use ::parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use ::parquet::errors::ParquetError;
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::reader::{FileReader, SerializedFileReader};
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::record::Field;
use ::parquet::schema::types::Type;

use super::row::{self, Cell, Format};
use super::table::{MAX_BYTES, Table};
use crate::error::{Error, Result, err};
use crate::replay::{Estimate, Settings};

/// A column's values.
enum Values {
    Text(Vec<ByteArray>),
    Whole(Vec<i64>),
    Number(Vec<f64>),
}

/// Writes the table that is this CSV. It is at `path` when it is whole, and not before: until then it is `<path>.partial`.
pub fn write(path: &Path, csv: &str) -> Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = Path::new(&partial);
    let io = |e: std::io::Error| err!(Io, "{}: {e}", path.display());
    let table = Table::parse(csv, Format::Csv)?;
    let columns = table.columns.iter().enumerate().map(|(i, name)| values(&table, i, name));
    let columns: Vec<Values> = columns.collect::<Result<_>>()?;
    let file = File::create(partial).map_err(io)?;
    let file = put(file, &table, &columns).map_err(|e| err!(Io, "{}: {e}", path.display()))?;
    file.sync_all().map_err(io)?;
    std::fs::rename(partial, path).map_err(io)
}

fn put(file: File, table: &Table, columns: &[Values]) -> Result<File, ParquetError> {
    let fields = table.columns.iter().zip(columns).map(|(name, values)| {
        let (physical, logical, converted) = match values {
            Values::Text(_) => (Physical::BYTE_ARRAY, Some(LogicalType::String), ConvertedType::UTF8),
            Values::Whole(_) => (Physical::INT64, None, ConvertedType::NONE),
            Values::Number(_) => (Physical::DOUBLE, None, ConvertedType::NONE),
        };
        let field = Type::primitive_type_builder(name, physical).with_repetition(Repetition::REQUIRED);
        field.with_logical_type(logical).with_converted_type(converted).build().map(Arc::new)
    });
    let fields = fields.collect::<Result<_, _>>()?;
    let schema = Arc::new(Type::group_type_builder("sweep").with_fields(fields).build()?);
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(WriterProperties::builder().build()))?;
    if !table.rows.is_empty() {
        let mut rows = writer.next_row_group()?;
        for values in columns {
            let Some(mut column) = rows.next_column()? else { break };
            match values {
                Values::Text(texts) => column.typed::<ByteArrayType>().write_batch(texts, None, None)?,
                Values::Whole(wholes) => column.typed::<Int64Type>().write_batch(wholes, None, None)?,
                Values::Number(numbers) => column.typed::<DoubleType>().write_batch(numbers, None, None)?,
            };
            column.close()?;
        }
        rows.close()?;
    }
    writer.into_inner()
}

/// A column as what it is in a row of a sweep. CSV does not say: `2` may be a J or a lambda.
fn values(table: &Table, at: usize, name: &str) -> Result<Values> {
    let place = row::Place { setting: 0, of: 0, trace: "", variant: "", n_layers: 0, n_experts: 0, n_tokens: 0 };
    let cells = [row::key(&place, &Settings::default()), row::values(&[], &Estimate::default())].concat();
    // Not among them: the tokens a second at other bandwidths.
    let cell = cells.into_iter().find(|(column, _)| column == name).map_or(Cell::Number(0.0), |(_, cell)| cell);
    let texts = table.rows.iter().map(|row| row[at].as_str());
    let wrong = |text: &str| err!(Format, "column '{name}': '{text}' is no number of its kind");
    Ok(match cell {
        Cell::Text(_) => Values::Text(texts.map(|text| text.as_bytes().to_vec().into()).collect()),
        Cell::Whole(_) => Values::Whole(texts.map(|t| t.parse().map_err(|_| wrong(t))).collect::<Result<_>>()?),
        Cell::Number(_) => Values::Number(texts.map(|t| t.parse().map_err(|_| wrong(t))).collect::<Result<_>>()?),
    })
}

/// The table as CSV: `Format` where the file is none, or has other types than a sweep's.
pub fn read(path: &Path) -> Result<String> {
    let file = File::open(path).map_err(|e| err!(Io, "{}: {e}", path.display()))?;
    let wrong = |e: ParquetError| -> Error { err!(Format, "{}: {e}", path.display()) };
    let reader = SerializedFileReader::new(file).map_err(wrong)?;
    let schema = reader.metadata().file_metadata().schema();
    let names: Vec<String> = schema.get_fields().iter().map(|field| row::csv_text(field.name())).collect();
    let mut csv = names.join(",");
    csv.push('\n');
    for row in reader.get_row_iter(None).map_err(wrong)? {
        let mut cells = row::Cells::new();
        for (name, field) in row.map_err(wrong)?.into_columns() {
            let cell = match field {
                Field::Str(text) => Cell::Text(text),
                Field::Long(n) if n >= 0 => Cell::Whole(n as u64),
                Field::Double(n) => Cell::Number(n),
                other => return Err(err!(Format, "{}: column '{name}' has {other}", path.display())),
            };
            cells.push((name, cell));
        }
        csv += &row::line(&row::Cells::new(), &cells, Format::Csv);
        csv.push('\n');
        if csv.len() as u64 > MAX_BYTES {
            return Err(err!(Format, "{}: as text more than the {MAX_BYTES} bytes that a sweep has", path.display()));
        }
    }
    Ok(csv)
}
