//! Folders that outlast a power failure.

use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Makes a folder, and those it lies in, unless it is there; and forces the names of those that are new
/// to the disk. A file may be forced there as often as one likes, and yet is lost if the folder it lies
/// in has no name.
///
/// # Errors
///
/// If something else has its name, or the system refuses.
pub fn make(folder: &Path) -> io::Result<()> {
    make_and_sync(folder, |folder| File::open(folder)?.sync_all())
}

fn make_and_sync(folder: &Path, mut sync: impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    let is_new = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
    let new: Vec<&Path> = folder.ancestors().take_while(is_new).collect();
    fs::create_dir_all(folder)?;
    new.into_iter().try_for_each(|folder| {
        let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty());
        sync(parent.unwrap_or(Path::new(".")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_new_name_is_forced_to_the_disk() {
        let here = std::env::temp_dir().join(format!("unisono-folder-{}", std::process::id()));
        let folder = here.join("a").join("b");
        let mut synced = Vec::new();
        let mut make = |folder: &Path| {
            synced.clear();
            make_and_sync(folder, |parent| {
                assert!(folder.is_dir(), "too early");
                synced.push(parent.to_owned());
                Ok(())
            })
            .unwrap();
            synced.clone()
        };
        assert_eq!(make(&folder), [here.join("a"), here.clone(), std::env::temp_dir()]);
        assert!(make(&folder).is_empty(), "none is new");
        assert_eq!(make(&here.join("c")), [&*here]);
        fs::remove_dir_all(&here).unwrap();
        super::make(&folder).unwrap();
        assert!(folder.is_dir());
        fs::remove_dir_all(&here).unwrap();
    }

    #[test]
    fn a_folder_beside_the_program_lies_in_the_present_one() {
        let name = format!("unisono-folder-{}-here", std::process::id());
        let mut synced = Vec::new();
        let sync = |parent: &Path| {
            synced.push(parent.to_owned());
            Ok(())
        };
        make_and_sync(Path::new(&name), sync).unwrap();
        fs::remove_dir(&name).unwrap();
        assert_eq!(synced, [Path::new(".")]);
    }

    #[test]
    fn a_file_in_the_way_is_an_error() {
        let path = std::env::temp_dir().join(format!("unisono-file-{}", std::process::id()));
        fs::write(&path, "").unwrap();
        assert!(make(&path).is_err());
        fs::remove_file(&path).unwrap();
    }
}
