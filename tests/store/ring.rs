//! Reads by an io_uring that the system itself makes late, short or impossible: files that the ring reads are pipes and folders here.
//! (Faults that a source says, for both ways of reading: `faults`, `pieces`.)

use std::fs::File;
use std::io::{self, IoSliceMut, Write};
use std::os::fd::FromRawFd;
use std::time::Duration;

use hotset::ErrorKind;
use hotset::store::{ReadAt, ReadBy, Stamp, Store, StoreConfig};

use crate::model::{BUFFERED, Model, RING, THREADS, config, small, until};

/// A model's file, but what the ring reads is something else.
struct Instead {
    file: Box<dyn ReadAt>,
    read: File,
}

impl ReadAt for Instead {
    fn read_at(&self, bufs: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        self.file.read_at(bufs, offset)
    }
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }
    fn stamp(&self) -> io::Result<Stamp> {
        self.file.stamp()
    }
    fn file(&self) -> Option<&File> {
        Some(&self.read)
    }
}

/// A layer of one slice in each of two files.
fn two_files() -> Model {
    Model::new(5, &[vec![(0, 16 * 4096)], vec![(0, 4096)]], 0)
}

/// The store with something else in the first file's place. None, and said, where it is not read by a ring.
fn with(m: &Model, config: StoreConfig, read: File) -> Option<Store> {
    let mut read = Some(read);
    let wrap = |_, file| match read.take() {
        Some(read) => Box::new(Instead { file, read }) as Box<dyn ReadAt>,
        None => file,
    };
    let store = Store::open_with(&m.files, &m.lens, &m.table, vec![], config, wrap).unwrap();
    let io = store.io_mode();
    if io.by == ReadBy::Ring {
        return Some(store);
    }
    println!("skipped: {}", io.by_reason);
    None
}

/// An end to read from and one to write to.
fn pipe() -> (File, File) {
    let mut fds = [0; 2];
    // SAFETY: there is room for two descriptors.
    assert_eq!(unsafe { libc::pipe(fds.as_mut_ptr()) }, 0);
    // SAFETY: both are new, and nobody else has them.
    let end = |fd| unsafe { File::from_raw_fd(fd) };
    (end(fds[0]), end(fds[1]))
}

/// The blocks of an expert of layer 0, as the drive would bring them.
fn blocks(m: &Model, store: &Store, expert: u32) -> Vec<u8> {
    let (t, block) = (&m.table.layers[0].tensors[0], store.io_mode().offset_align as u64);
    let start = t.offset_bytes + t.slice_bytes * u64::from(expert);
    assert!(start % block == 0 && t.slice_bytes % (2 * block) == 0, "in step with blocks of {block}");
    m.data[0][start as usize..][..t.slice_bytes as usize].to_vec()
}

fn send(to: &mut File, bytes: &[u8]) {
    to.write_all(bytes).unwrap();
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_read_that_lasts_holds_up_nothing_else() {
    let m = two_files();
    let (reader, mut writer) = pipe();
    let config = StoreConfig { timeout: Duration::from_millis(100), ..config(2, 2, RING) };
    let Some(store) = with(&m, config, reader) else { return };
    store.fetch(0, 3, 1).unwrap();
    for expert in 0..5 {
        store.fetch(1, expert, 0).unwrap();
        store.wait(1, 0, None).unwrap();
        assert!(m.holds(&store, 1, 0, expert));
    }
    let e = store.wait(0, 1, None).unwrap_err();
    assert!(e.kind == ErrorKind::Timeout && e.detail.contains("layer 0 expert 3 slot 1"), "{e}");
    assert_eq!(store.fetch(0, 4, 1).unwrap_err().kind, ErrorKind::Timeout);
    assert_eq!(store.release(0, 1).unwrap_err().kind, ErrorKind::State);
    // it comes in two parts, the first of which is a short read
    let (bytes, reads) = (blocks(&m, &store, 3), store.counters().reads);
    let (first, second) = bytes.split_at(bytes.len() / 2);
    send(&mut writer, first);
    until(|| store.counters().reads == reads + 1);
    assert!(!store.is_over(0, 1, None).unwrap());
    send(&mut writer, second);
    until(|| store.is_over(0, 1, None).unwrap());
    store.wait(0, 1, None).unwrap();
    assert!(m.holds(&store, 0, 1, 3));
    // the end of the file, and what comes next is as good
    drop(writer);
    store.fetch(0, 2, 0).unwrap();
    let e = store.wait(0, 0, None).unwrap_err();
    for part in ["layer 0 expert 2 slot 0 slice 0", "shard-0.gguf", "wanted 65536 bytes, found 0: the file ends there"]
    {
        assert!(e.detail.contains(part), "{part}: {e}");
    }
    store.fetch(1, 1, 1).unwrap();
    store.wait(1, 1, None).unwrap();
    assert!(m.holds(&store, 1, 1, 1));
}

#[test]
#[cfg_attr(miri, ignore)]
fn what_the_system_refuses_is_an_error_with_its_numbers() {
    let m = two_files();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(store) = with(&m, config(2, 1, RING), File::open(folder.path()).unwrap()) else { return };
    let t = &m.table.layers[0].tensors[0];
    for expert in 0..5 {
        store.fetch(0, expert, 0).unwrap();
        let e = store.wait(0, 0, None).unwrap_err();
        assert_eq!(e.kind, ErrorKind::Io);
        let offset =
            format!("offset {}, wanted 65536 bytes, found 0", t.offset_bytes + t.slice_bytes * u64::from(expert));
        for part in [offset.as_str(), &io::Error::from_raw_os_error(libc::EISDIR).to_string()] {
            assert!(e.detail.contains(part), "{part}: {e}");
        }
        store.fetch(1, expert, 0).unwrap();
        store.wait(1, 0, None).unwrap();
        assert!(m.holds(&store, 1, 0, expert));
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_place_is_left_for_what_is_waited_for() {
    let m = two_files();
    let (reader, writer) = pipe();
    let Some(store) = with(&m, config(2, 3, RING), reader) else { return };
    // two may be read ahead at a time, and do not come
    for slot in 0..2 {
        assert!(store.fetch_ahead(0, slot, slot).unwrap());
        assert!(store.fetch_ahead(1, slot, slot).unwrap());
    }
    until(|| store.is_ready(1, 0, Some(0)));
    store.fetch(1, 4, 0).unwrap();
    store.wait(1, 0, None).unwrap();
    assert!(m.holds(&store, 1, 0, 4));
    drop(writer);
    for slot in 0..2 {
        until(|| store.is_over(0, slot, None).unwrap());
        store.wait_layer(0).unwrap();
    }
    store.adopt(0, 1).unwrap();
    assert!(store.wait_layer(0).unwrap_err().detail.contains("found 0: the file ends there"));
}

#[test]
#[cfg_attr(miri, ignore)]
fn fewer_lanes_are_fewer_reads_and_more_are_used_at_once() {
    let m = two_files();
    let (reader, mut writer) = pipe();
    let Some(store) = with(&m, config(2, 4, RING), reader) else { return };
    store.set_lanes(1);
    store.fetch(0, 3, 1).unwrap();
    until(|| store.counters().reads == 1);
    store.fetch(1, 2, 0).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(store.counters().reads, 1, "one lane, and its read lasts");
    // nothing else ends meanwhile: the thread is woken by the setting alone
    store.set_lanes(2);
    store.wait(1, 0, None).unwrap();
    assert!(m.holds(&store, 1, 0, 2));
    send(&mut writer, &blocks(&m, &store, 3));
    store.wait(0, 1, None).unwrap();
    assert!(m.holds(&store, 0, 1, 3));
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_store_is_dropped_when_its_reads_are_over_and_not_before() {
    let m = two_files();
    let (reader, mut writer) = pipe();
    let Some(store) = with(&m, config(2, 1, RING), reader) else { return };
    let bytes = blocks(&m, &store, 0);
    store.fetch(0, 0, 0).unwrap();
    store.fetch(1, 0, 0).unwrap();
    until(|| store.counters().reads == 1);
    std::thread::scope(|s| {
        let dropping = s.spawn(|| drop(store));
        std::thread::sleep(Duration::from_millis(30));
        assert!(!dropping.is_finished(), "the system still writes into its memory");
        send(&mut writer, &bytes);
    });
}

#[test]
#[cfg_attr(miri, ignore)]
fn who_reads_is_said() {
    let m = small();
    let by = |store: Store| (store.io_mode().by, store.io_mode().by_reason.clone());
    assert_eq!(by(m.open(config(2, 1, THREADS))), (ReadBy::Threads, "as asked for".to_owned()));
    let (read_by, why) = by(m.open(StoreConfig { read_by: ReadBy::Ring, ..config(2, 1, BUFFERED) }));
    assert!(read_by == ReadBy::Threads && why.contains("shard-0.gguf: buffered reads"), "{why}");
    let (read_by, why) = by(m.open(config(2, 1, RING)));
    assert_eq!(read_by == ReadBy::Ring, why.is_empty());
    if !why.is_empty() {
        println!("skipped: {why}");
    }
}
