#include "core/mailbox.h"

#include <cstddef>

namespace moetier {
namespace {

using Clock = std::chrono::steady_clock;

std::uint32_t load(const unsigned &word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

void store(unsigned &word, std::uint32_t value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

} // namespace

static_assert(offsetof(Box, answered) == 64 && offsetof(Box, refused) == 68 && sizeof(Box) == 128);

Mailbox::Mailbox(const Mail &mail, std::size_t top_k, std::size_t experts, std::vector<const std::uint64_t *> tables,
                 ThreadPool &pool, Compute compute, const std::vector<int> &cpus)
    : mail_(mail), top_k_(top_k), experts_(experts), tables_(std::move(tables)), pool_(pool),
      compute_(std::move(compute)), layer_nanoseconds_(tables_.size()), meeting_(std::make_unique<Meeting>()) {
  pool_.demand_usable(); // so that whoever may use the pool may use this, too
  meeting_->thread = std::thread([this, cpus] {
    allow_cpus(cpus);
    work();
  });
}

Mailbox::~Mailbox() {
  close();
  if (!pool_.usable()) (void)meeting_.release();
}

Mailbox::Meeting &Mailbox::meeting() const {
  pool_.demand_usable();
  return *meeting_;
}

void Mailbox::close() {
  if (!pool_.usable()) return;
  Meeting &meet = *meeting_;
  {
    const std::lock_guard lock(meet.mutex); // else serve() could look at stop_ before and sleep after
    stop_.store(true);
  }
  meet.changed.notify_all();
  if (meet.thread.joinable()) meet.thread.join();
}

void Mailbox::wake() {
  Meeting &meet = meeting();
  pool_.stay_awake(kAwake);
  {
    const std::lock_guard lock(meet.mutex);
    meet.awake = true;
  }
  meet.changed.notify_all();
}

void Mailbox::work() {
  Meeting &meet = *meeting_;
  std::uint32_t done = load(mail_.box->answered);
  auto last = Clock::now();
  while (!stop_.load(std::memory_order_relaxed)) {
    const std::uint32_t posted = load(mail_.box->posted);
    if (posted != done) {
      serve(posted);
      done = posted;
      pool_.stay_awake(kAwake);
      last = Clock::now();
      continue;
    }
    for (int turn = 0; turn < 64; ++turn) {
      if (load(mail_.box->posted) != done) break;
      relax();
    }
    if (Clock::now() - last < kAwake) continue;
    std::unique_lock lock(meet.mutex);
    if (meet.changed.wait_for(lock, kNap, [&] { return meet.awake || stop_.load(); })) last = Clock::now();
    meet.awake = false;
  }
}

bool Mailbox::all_here(std::span<const std::uint64_t> addresses, std::size_t pairs) const {
  for (std::size_t p = 0; p < pairs; ++p) {
    const std::int32_t id = mail_.ids[p];
    if (id >= 0 && static_cast<std::size_t>(id) < experts_ && addresses[static_cast<std::size_t>(id)] == 0)
      return false;
  }
  return true;
}

void Mailbox::serve(std::uint32_t request) {
  const auto start = Clock::now();
  const auto tokens = static_cast<std::size_t>(mail_.box->tokens);
  const auto layer = static_cast<std::size_t>(mail_.box->layer);
  const std::span<const std::uint64_t> addresses(tables_[layer], experts_);
  if (all_here(addresses, tokens * top_k_)) {
    const StepInput input{nullptr, mail_.x, mail_.ids, nullptr, mail_.weights, tokens};
    store(compute_(input, addresses, mail_.rows) ? mail_.box->answered : mail_.box->refused, request);
  } else {
    Meeting &meet = *meeting_;
    std::unique_lock lock(meet.mutex);
    meet.help = request;
    meet.changed.notify_all();
    meet.changed.wait(lock, [&] { return meet.help == 0 || stop_.load(); });
    helps_.fetch_add(1, std::memory_order_relaxed);
  }
  calls_.fetch_add(1, std::memory_order_relaxed);
  const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start);
  nanoseconds_.fetch_add(static_cast<std::uint64_t>(spent.count()), std::memory_order_relaxed);
  layer_nanoseconds_[layer].fetch_add(static_cast<std::uint64_t>(spent.count()), std::memory_order_relaxed);
}

std::uint32_t Mailbox::await_help(std::chrono::milliseconds timeout) {
  Meeting &meet = meeting();
  std::unique_lock lock(meet.mutex);
  const auto asked = [&] { return meet.help != 0 && meet.help != meet.taken; };
  meet.changed.wait_for(lock, timeout, [&] { return asked() || stop_.load(); });
  if (!asked()) return 0;
  return meet.taken = meet.help;
}

void Mailbox::answer(std::uint32_t request) {
  helped(request, mail_.box->answered);
}

void Mailbox::refuse(std::uint32_t request) {
  helped(request, mail_.box->refused);
}

void Mailbox::helped(std::uint32_t request, unsigned &word) {
  Meeting &meet = meeting();
  store(word, request);
  {
    const std::lock_guard lock(meet.mutex);
    meet.help = 0;
  }
  meet.changed.notify_all();
}

Mailbox::Counts Mailbox::counts() const {
  return {calls_.load(), nanoseconds_.load(), helps_.load()};
}

} // namespace moetier
