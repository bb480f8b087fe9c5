-- Reserve amounts for a request from all of its holders, or from none of them. The Python twins are decision.admit and
-- windows.exceeded in gateway/limits; tests/gateway/limits/redis/test_store.py runs both against the same sequences.
--
-- KEYS: the hash and the leases of each holder (of a session: the sessions of its owner, by their last use); last the hash of what this worker has reserved.
-- ARGV: the request's id; the seconds of a lease and the time after which the request is too late; then for each holder two texts of
-- numbers: first its limits (requests and tokens per minute, concurrent; 0: none), and for each window its name, the seconds of a slice
-- (0: of the calendar), the limits of tokens and cost (0: none), and the most tokens and cost that a request reserves; then the amounts
-- (requests, slots, tokens, cost). Costs are in whole nano-units.
-- Returns a text of numbers: the number of the holder that refuses (0: none, -1: too late), the number of its limit (1 and 2: requests and tokens per
-- minute, 3: concurrent, then two for each window, of tokens and of cost), the milliseconds to wait, the time in microseconds, what is
-- left of the limit, the sessions that were forgotten; then for each holder the milliseconds until its buckets are full, and for each of its windows the tokens
-- and the cost that are used, and the milliseconds until nothing of it is used.
local request, times = ARGV[1], words_of(ARGV[2])
local lease_seconds, deadline = tonumber(times[1]), tonumber(times[2])
if now > deadline then return reply_of({-1, 0, 0, math.floor(now * 1000000)}) end

-- Return the seconds until a window has lost at least a missing amount: windows._seconds_until_free.
local function seconds_until_free(window, kind, missing)
  if window.name == 'session' then return 1e12 end
  if window.slice == 0 then return seconds_left(window.name) end
  local last = period_of(window, now)
  for _, slice in ipairs(counted_periods(window)) do
    if missing <= 0 then break end
    missing, last = missing - slice[kind], slice.number
  end
  return (last + SLICES + 1) * window.slice - now
end

-- Note the use of a session, and forget the session of its owner that was used least recently if there are too many: sessions.py.
local function note_session(sessions, key)
  redis.call('ZREMRANGEBYSCORE', sessions, '-inf', now - LIFETIMES.session)
  redis.call('ZADD', sessions, now, key)
  redis.call('EXPIRE', sessions, LIFETIMES.session)
  if redis.call('ZCARD', sessions) <= 1024 then return 0 end
  redis.call('DEL', redis.call('ZPOPMIN', sessions)[1])
  return 1
end

-- The limit with the longest wait is reported; of equal waits the first, whatever their rounding: decision._longest.
local longest, refusing_holder, refusing_limit, left = -1, 0, 0, 0
local function refuse(holder, limit, wait, still_left)
  if wait > longest + 0.000001 then longest, refusing_holder, refusing_limit, left = wait, holder, limit, still_left end
end
local function check_bucket(holder, number, full, limit, amount)
  if limit > 0 and amount > 0 then
    local wait = full - now - 60 * (1 - math.min(amount / limit, 1))
    if wait > 0.000001 then refuse(holder, number, wait, limit * (1 - (full - now) / 60)) end
  end
end
local function check_budget(holder, number, window, kind, used, limit, ahead)
  if limit > 0 and ahead > 0 and used + ahead > limit then
    refuse(holder, number, seconds_until_free(window, kind, used + ahead - limit), limit - used)
  end
end

-- Read the arguments.
local count, holders, arguments = (#KEYS - 1) / 2, {}, {}
for i = 1, count do
  local limits, amounts, windows = words_of(ARGV[2 * i + 1]), words_of(ARGV[2 * i + 2]), {}
  local a = {rpm = tonumber(limits[1]), tpm = tonumber(limits[2]), concurrent = tonumber(limits[3])}
  a.requests, a.slots, a.tokens, a.cost = tonumber(amounts[1]), tonumber(amounts[2]), tonumber(amounts[3]), tonumber(amounts[4])
  for at = 4, #limits, 6 do
    windows[#windows + 1] = {
      name = limits[at], slice = tonumber(limits[at + 1]),
      token_limit = tonumber(limits[at + 2]), cost_limit = tonumber(limits[at + 3]),
      tokens_ahead = math.min(a.tokens, tonumber(limits[at + 4])), cost_ahead = math.min(a.cost, tonumber(limits[at + 5])),
    }
  end
  holders[i], arguments[i] = read_holder(KEYS[2 * i - 1], windows), a
end

-- Check all limits of all holders.
for i = 1, count do
  local a, holder = arguments[i], holders[i]
  if a.concurrent > 0 and a.slots > 0 then
    -- A gateway that died does not renew its leases; they expire.
    redis.call('ZREMRANGEBYSCORE', KEYS[2 * i], '-inf', now)
    if redis.call('ZCARD', KEYS[2 * i]) + a.slots > a.concurrent then refuse(i, 3, 1e12, 0) end
  end
  check_bucket(i, 1, holder.r, a.rpm, a.requests)
  check_bucket(i, 2, holder.t, a.tpm, a.tokens)
  for w, window in ipairs(holder.windows) do
    local tokens, cost = used_in(window)
    check_budget(i, 2 + 2 * w, window, 'tokens', tokens, window.token_limit, window.tokens_ahead)
    check_budget(i, 3 + 2 * w, window, 'cost', cost, window.cost_limit, window.cost_ahead)
  end
end

-- Reserve, and write down what was reserved, so that it is settled once.
local evicted = 0
if refusing_holder == 0 then
  local reserved = {}
  for i = 1, count do
    local a, holder = arguments[i], holders[i]
    if a.rpm > 0 then take_from_bucket(holder, 'r', 60 * a.requests / a.rpm) end
    if a.tpm > 0 then take_from_bucket(holder, 't', 60 * math.min(a.tokens / a.tpm, 1)) end
    for _, window in ipairs(holder.windows) do
      add_to_period(window, period_of(window, now), window.tokens_ahead, window.cost_ahead)
    end
    write_holder(KEYS[2 * i - 1], holder)
    if holder.windows[1] and holder.windows[1].name == 'session' then evicted = evicted + note_session(KEYS[2 * i], KEYS[2 * i - 1]) end
    reserved[2 * i - 1] = request .. ' ' .. KEYS[2 * i - 1]
    reserved[2 * i] = string.format('%.17g %.17g %.17g', now, holder.r + holder.rb, holder.t + holder.tb)
    if a.concurrent > 0 and a.slots > 0 then
      redis.call('ZADD', KEYS[2 * i], now + lease_seconds, request)
      redis.call('EXPIRE', KEYS[2 * i], math.ceil(lease_seconds) + 1)
    end
  end
  redis.call('HSET', KEYS[#KEYS], unpack(reserved))
  redis.call('EXPIRE', KEYS[#KEYS], 3 * 86400)
end

local reply = {refusing_holder, refusing_limit, math.ceil(longest * 1000), math.floor(now * 1000000), text_of(left), evicted}
for i = 1, count do
  append_counts(reply, holders[i])
end
return reply_of(reply)
