// Promises without deeds: every sync succeeds and does nothing. Compiled by the test that must find this out.
#include <stddef.h>

int fsync(int descriptor) { (void)descriptor; return 0; }
int fdatasync(int descriptor) { (void)descriptor; return 0; }
int syncfs(int descriptor) { (void)descriptor; return 0; }
void sync(void) {}
int msync(void *start, size_t length, int flags) { (void)start; (void)length; (void)flags; return 0; }
int sync_file_range(int descriptor, long long offset, long long bytes, unsigned flags) {
    (void)descriptor; (void)offset; (void)bytes; (void)flags;
    return 0;
}
