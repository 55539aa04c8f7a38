/* Preloaded into a run by test_cannot_die.py: while the file named by FAULTY_SWITCH exists, opening, making or renaming
   files under FAULTY_PREFIX fails with EIO; while FAULTY_CLOCK exists, the wall clock is as many seconds off as it says. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int fails(const char *path) {
    const char *prefix = getenv("FAULTY_PREFIX"), *on = getenv("FAULTY_SWITCH");
    return path && prefix && on && !strncmp(path, prefix, strlen(prefix)) && access(on, F_OK) == 0;
}

#define OPEN(name)                                                                  \
    int name(const char *path, int flags, ...) {                                    \
        va_list rest;                                                               \
        va_start(rest, flags);                                                      \
        mode_t mode = va_arg(rest, mode_t);                                         \
        va_end(rest);                                                               \
        if (fails(path)) { errno = EIO; return -1; }                                \
        int (*real)(const char *, int, mode_t) = dlsym(RTLD_NEXT, #name);           \
        return real(path, flags, mode);                                             \
    }
OPEN(open)
OPEN(open64)

int mkdir(const char *path, mode_t mode) {
    if (fails(path)) { errno = EIO; return -1; }
    int (*real)(const char *, mode_t) = dlsym(RTLD_NEXT, "mkdir");
    return real(path, mode);
}

int rename(const char *from, const char *to) {
    if (fails(to)) { errno = EIO; return -1; }
    int (*real)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
    return real(from, to);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    const char *name = getenv("FAULTY_CLOCK");
    if (clock == CLOCK_REALTIME && name) {
        FILE *file = fopen(name, "r");
        long seconds = 0;
        if (file) {
            if (fscanf(file, "%ld", &seconds) == 1) now->tv_sec += seconds;
            fclose(file);
        }
    }
    return code;
}
