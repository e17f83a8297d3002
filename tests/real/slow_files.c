/* A file system that stands for Lustre: it shows a folder at its own path, read-only, takes
 * a while for each metadata operation, and counts these.
 *
 * usage: slow_files FOLDER MICROSECONDS COUNTER
 *
 * COUNTER is a file; its first eight bytes are the number of operations. The kernel remembers
 * names that exist, but neither attributes nor names that do not. It ends when it is unmounted. */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static int root;
static int64_t *counter;
static struct timespec delay;

static const char *counted(const char *path)
{
    __sync_fetch_and_add(counter, 1);
    nanosleep(&delay, NULL);
    return path[1] ? path + 1 : ".";
}

static int result(int value)
{
    return value < 0 ? -errno : value;
}

static int slow_getattr(const char *path, struct stat *found, struct fuse_file_info *info)
{
    if (info)
        return result(fstat(info->fh, found));
    return result(fstatat(root, counted(path), found, AT_SYMLINK_NOFOLLOW));
}

static int slow_readlink(const char *path, char *target, size_t size)
{
    ssize_t length = readlinkat(root, counted(path), target, size - 1);
    if (length >= 0)
        target[length] = 0;
    return length < 0 ? -errno : 0;
}

static int slow_open(const char *path, struct fuse_file_info *info)
{
    int file = openat(root, counted(path), info->flags & ~O_NOFOLLOW);
    info->fh = file;
    info->keep_cache = 1;
    return file < 0 ? -errno : 0;
}

static int slow_read(const char *path, char *into, size_t size, off_t at, struct fuse_file_info *info)
{
    return result(pread(info->fh, into, size, at));
}

static int slow_release(const char *path, struct fuse_file_info *info)
{
    return result(close(info->fh));
}

static int slow_readdir(const char *path, void *into, fuse_fill_dir_t fill, off_t at,
                        struct fuse_file_info *info, enum fuse_readdir_flags flags)
{
    int file = openat(root, counted(path), O_RDONLY | O_DIRECTORY);
    DIR *folder = file < 0 ? NULL : fdopendir(file);
    if (!folder)
        return -errno;
    for (struct dirent *each; (each = readdir(folder));)
        fill(into, each->d_name, NULL, 0, 0);
    closedir(folder);
    return 0;
}

static void *slow_init(struct fuse_conn_info *connection, struct fuse_config *config)
{
    config->entry_timeout = 3600;
    config->attr_timeout = config->negative_timeout = 0;
    config->use_ino = 1;
    config->nullpath_ok = 0;
    return NULL;
}

static const struct fuse_operations operations = {
    .init = slow_init, .getattr = slow_getattr, .readlink = slow_readlink, .open = slow_open,
    .read = slow_read, .release = slow_release, .readdir = slow_readdir,
};

int main(int count, char **words)
{
    long microseconds = count == 4 ? atol(words[2]) : -1;
    if (microseconds < 0)
        return 2;
    delay.tv_sec = microseconds / 1000000;
    delay.tv_nsec = microseconds % 1000000 * 1000;
    root = open(words[1], O_PATH | O_DIRECTORY);
    int file = open(words[3], O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (root < 0 || ftruncate(file, sizeof *counter))
        return 1;
    counter = mmap(NULL, sizeof *counter, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (counter == MAP_FAILED)
        return 1;
    char *mounted[] = {words[0], words[1], NULL};
    return fuse_main(2, mounted, &operations, NULL);
}
