// Threads that are started under this take no signals: those belong to the host program, and would
// end calls early in ours.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace kvdisk::io {

class AllSignalsBlocked {
  public:
    AllSignalsBlocked() noexcept {
        sigset_t all;
        ::sigfillset(&all);
        ::pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~AllSignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    AllSignalsBlocked(const AllSignalsBlocked&) = delete;
    AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

  private:
    sigset_t before_;
};

}  // namespace kvdisk::io
