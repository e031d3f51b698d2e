//! Files: in, out, and never anywhere else.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown, symlink},
};

use evalgrid_sandbox::*;

use crate::common::*;

/// What an agent makes is read as it is, and what we write it finds as it was.
pub async fn files_come_back_byte_for_byte(world: World) {
    let sandbox = world.create().await;
    let every_byte: Vec<u8> = (0..=255).collect();
    let cases: &[(&str, &[u8])] = &[
        ("zero", b"a\0b\0"),
        ("windows", b"one\r\ntwo\r\n"),
        ("open end", b"no newline"),
        ("empty", b""),
        ("every byte", &every_byte),
        ("odd \"name\" $(x) `y` 'z'", b"1"),
        ("new\nline", b"2"),
        (" leading and trailing ", b"3"),
        ("-rf", b"4"),
        ("\u{fc}n\u{ef}c\u{f6}de \u{2603}", b"5"),
        ("a*?[b]\\c", b"6"),
    ];
    let files: Vec<_> = cases.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
    sandbox.write_files(Base::Workspace, &files, false).await.unwrap();
    // The agent copies each, and we read the copies.
    let exit = sandbox
        .run(&bash(
            "copy",
            "mkdir copies; for f in * ; do [ -f \"$f\" ] && cat < \"./$f\" > \"copies/$f\"; done; true",
        ))
        .await
        .unwrap();
    assert_eq!((exit.code, stderr(&exit).as_str()), (0, ""));
    for (name, bytes) in cases {
        for path in [(*name).to_owned(), format!("copies/{name}")] {
            let read = sandbox.read_file(Base::Workspace, &path, 1000).await.unwrap();
            assert_eq!(read.as_deref(), Some(*bytes), "{path:?}");
        }
    }
    // A prompt that no argument can hold goes by a file.
    let prompt = vec![b'p'; 150_000];
    sandbox
        .write_files(Base::Home, &[("prompt".to_owned(), prompt)], true)
        .await
        .unwrap();
    let exit = sandbox
        .run(&bash(
            "prompt",
            "wc -c < ~/prompt; ln -s zero link; (umask 077; printf mine > mine)",
        ))
        .await
        .unwrap();
    assert_eq!(stdout(&exit), "150000\n", "{}", stderr(&exit));
    let read = |path| sandbox.read_file(Base::Workspace, path, 100);
    assert_eq!(read("link").await.unwrap().unwrap(), b"a\0b\0");
    assert_eq!(read("mine").await.unwrap().unwrap(), b"mine");
    // Somebody else's, closed to all others: root reads it, nobody else could.
    let mine = world.folder().join("workspace/mine");
    if chown(&mine, Some(4242), Some(4242)).is_ok() {
        assert_eq!(fs::metadata(&mine).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(read("mine").await.unwrap().unwrap(), b"mine");
    }
    world.destroy().await;
}

pub async fn files_go_in_and_out(world: World) {
    let sandbox = world.create().await;
    let big = vec![b'x'; 3_000_000];
    let files = [
        ("a/b/c.txt".to_owned(), b"text\n".to_vec()),
        ("empty".to_owned(), Vec::new()),
        ("big".to_owned(), big),
    ];
    sandbox.write_files(Base::Workspace, &files, false).await.unwrap();
    sandbox
        .write_files(Base::Home, &[(".config/secret".to_owned(), b"s3cret".to_vec())], true)
        .await
        .unwrap();
    let exit = sandbox
        .run(&bash(
            "look",
            "stat -c '%a %n' a a/b a/b/c.txt ~/.config ~/.config/secret | sed \"s:$HOME:~:\"; cat a/b/c.txt; echo new > a/b/c.txt",
        ))
        .await
        .unwrap();
    assert_eq!(
        stdout(&exit),
        "755 a\n755 a/b\n644 a/b/c.txt\n755 ~/.config\n600 ~/.config/secret\ntext\n",
        "{}",
        stderr(&exit)
    );
    let read = |base, path, limit| sandbox.read_file(base, path, limit);
    assert_eq!(read(Base::Workspace, "a/b/c.txt", 100).await.unwrap().unwrap(), b"new\n");
    assert_eq!(read(Base::Workspace, "big", 10).await.unwrap().unwrap(), b"xxxxxxxxxx");
    for missing in ["nothing", "a", "a/b/c.txt/d", "nothing/at/all"] {
        assert_eq!(read(Base::Workspace, missing, 10).await.unwrap(), None, "{missing}");
    }
    // Written again: replaced, and private now.
    sandbox
        .write_files(Base::Workspace, &[("big".to_owned(), b"small".to_vec())], true)
        .await
        .unwrap();
    assert_eq!(read(Base::Workspace, "big", 100).await.unwrap().unwrap(), b"small");
    assert_eq!(
        fs::metadata(world.folder().join("workspace/big")).unwrap().permissions().mode() & 0o777,
        0o600
    );
    for _ in 0..2 {
        sandbox.remove_file(Base::Workspace, "big").await.unwrap();
    }
    assert_eq!(read(Base::Workspace, "big", 1).await.unwrap(), None);
    // What the agent may put in the way.
    sandbox.run(&bash("traps", "mkfifo pipe; mkdir folder")).await.unwrap();
    assert_eq!(read(Base::Workspace, "pipe", 10).await.unwrap(), None);
    for path in ["pipe", "folder", "", "/abs", "../up", "a/../../up"] {
        let written = sandbox
            .write_files(Base::Workspace, &[(path.to_owned(), b"x".to_vec())], false)
            .await;
        assert!(matches!(written, Err(SandboxError::Operation { .. })), "{path}: {written:?}");
    }
    world.destroy().await;
}

pub async fn symlinks_lead_nowhere(world: World) {
    let sandbox = world.create().await;
    let outside = world.root.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), "outside").unwrap();
    let workspace = world.folder().join("workspace");
    fs::write(workspace.join("inner"), "inside").unwrap();
    symlink(&outside, workspace.join("folder")).unwrap();
    symlink(outside.join("file"), workspace.join("absolute")).unwrap();
    symlink("../home/x", workspace.join("sideways")).unwrap();
    symlink("inner", workspace.join("within")).unwrap();
    symlink("loop", workspace.join("loop")).unwrap();
    for path in ["folder/file", "absolute", "sideways", "loop", "folder/new"] {
        let read = sandbox.read_file(Base::Workspace, path, 100).await;
        assert!(!matches!(read, Ok(Some(_))), "{path}: {read:?}");
        let written = sandbox
            .write_files(Base::Workspace, &[(path.to_owned(), b"escaped".to_vec())], false)
            .await;
        assert!(matches!(written, Err(SandboxError::Operation { .. })), "{path}: {written:?}");
    }
    assert!(sandbox.remove_file(Base::Workspace, "folder/file").await.is_err());
    assert_eq!(sandbox.read_file(Base::Workspace, "within", 100).await.unwrap().unwrap(), b"inside");
    // The base itself.
    fs::remove_dir_all(world.folder().join("home")).unwrap();
    symlink(&outside, world.folder().join("home")).unwrap();
    assert!(!matches!(sandbox.read_file(Base::Home, "file", 100).await, Ok(Some(_))));
    assert!(
        sandbox
            .write_files(Base::Home, &[("new".to_owned(), Vec::new())], false)
            .await
            .is_err()
    );
    assert_eq!(fs::read_to_string(outside.join("file")).unwrap(), "outside");
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    world.destroy().await;
    assert!(outside.join("file").exists());
}

pub async fn shared_files_are_read_only_and_replaced_as_a_whole(world: World) {
    let files = |text: &str, names: &[&str]| -> Vec<(String, Vec<u8>)> {
        names.iter().map(|name| ((*name).to_owned(), text.as_bytes().to_vec())).collect()
    };
    // Before anything is shared.
    let early = world.create().await;
    let folder = early.shared().to_owned();
    let look = format!("cd -P {folder} || exit 9; grep -r . . | sort; find . -printf '%m %P\n' | sort -k2");
    assert_ne!(early.run(&bash("nothing", &look)).await.unwrap().code, 0);
    world.provider.share(&files("one", &["a", "deep/er/b"])).unwrap();
    let first = "./a:one\n./deep/er/b:one\n555 \n444 a\n555 deep\n555 deep/er\n444 deep/er/b\n";
    assert_eq!(stdout(&early.run(&bash("one", &look)).await.unwrap()), first);
    // Refused as a whole, and what was there stays.
    for bad in ["", "/abs", "../up", "a"] {
        let result = world.provider.share(&files("bad", &["a", bad]));
        assert!(matches!(result, Err(SandboxError::Operation { .. })), "{bad}");
    }
    assert_eq!(stdout(&early.run(&bash("still.one", &look)).await.unwrap()), first);
    // Replaced for the living and the coming, by another executor too.
    let second = (world.make)(world.root.path());
    second.share(&files("two", &["c"])).unwrap();
    let spec = SandboxSpec {
        name: format!("{}-late", world.name),
        ..world.spec()
    };
    let late = second.create(&spec).await.unwrap();
    for sandbox in [&early, &late] {
        assert_eq!(stdout(&sandbox.run(&bash("two", &look)).await.unwrap()), "./c:two\n555 \n444 c\n");
    }
    second.destroy(&spec.name).await.unwrap();
    world.destroy().await;
}
